"""What goes wrong on one device is decided by all: K5, NaN, an overflowing scale, a mismatch, a lost peer."""

import time

import pytest
import torch

from evener.errors import PeerLostError, ReductionMismatchError
from tests.local.pool import Pool
from tests.local.training import Case, Device, DeviceRun, Fault, global_batches, plain, run_steps
from tests.reference import relative_error


def assert_alike(runs: list[DeviceRun]) -> None:
    """All devices decided alike, said the same, and had equal parameters after every try."""
    first = runs[0]
    for run in runs[1:]:
        assert [(t.step, t.do, t.reason, t.checksum) for t in run.tries] == [
            (t.step, t.do, t.reason, t.checksum) for t in first.tries
        ]


def assert_unmoved(run: DeviceRun, number: int) -> None:
    """Try `number` moved no parameter."""
    assert run.tries[number].checksum == run.tries[number - 1].checksum
    assert run.tries[number].gradients is None


@pytest.mark.parametrize("kind", ["memory in forward", "memory in backward"])
@pytest.mark.parametrize("share", [((4,), (4,)), ((3, 2), (2, 1))], ids=["one each", "two each"])
def test_k5_out_of_memory_on_one_device(pool: Pool, kind: str, share: tuple) -> None:
    case = Case(micro_batches=share, steps=4, dtype=torch.float64, fault=Fault(device=1, step=1, kind=kind))
    runs = run_steps(pool, case)
    assert_alike(runs)
    assert [(t.step, t.do) for t in runs[0].tries] == [
        (0, "apply"),
        (1, "shrink"),
        (1, "apply"),
        (2, "apply"),
        (3, "apply"),
    ]
    assert runs[0].tries[1].reason == "test/1 ran out of memory"
    assert_unmoved(runs[0], 1)
    want = plain(case)
    assert relative_error(runs[0].parameters, want.parameters) <= 1e-12
    assert max(map(relative_error, [t.gradients for t in runs[1].applied], want.gradients)) <= 1e-12


@pytest.mark.parametrize("do", ["skip", "stop"])
def test_a_nan_on_one_device_is_a_verdict_of_all(pool: Pool, do: str) -> None:
    fault = Fault(device=0, step=1, kind="NaN loss")
    case = Case(micro_batches=((5,), (2,), (1,)), dtype=torch.float64, on_non_finite=do, fault=fault)
    runs = run_steps(pool, case)
    assert_alike(runs)
    assert [t.do for t in runs[0].tries] == ["apply", do, "apply"]
    assert runs[0].tries[1].reason == "test/0 has a loss that is NaN or infinite"
    assert_unmoved(runs[0], 1)
    # A skipped step leaves nothing behind: the run is the one without that batch.
    assert relative_error(runs[2].parameters, plain(case, without=(1,)).parameters) <= 1e-12


@pytest.mark.parametrize("device", [0, 1])
def test_a_scale_that_overflows_on_one_device_skips_the_step_on_all(pool: Pool, device: int) -> None:
    fault = Fault(device=device, step=1, kind="infinite gradient")
    case = Case(micro_batches=((6,), (2,)), loss_scale=2.0**16, max_norm=1.0, fault=fault)
    runs = run_steps(pool, case)
    assert_alike(runs)
    assert_unmoved(runs[0], 1)
    assert relative_error(runs[0].parameters, plain(case, without=(1,)).parameters) <= 1e-6


def ahead(rank: int, world_size: int) -> str:
    """Device 1 left out step 0, as a loop that breaks early would."""
    case = Case(micro_batches=((6,), (2,)))
    device = Device(rank, world_size, case)
    try:
        device.step(rank, list(case.micro_batches), global_batches(case)[0])
    except ReductionMismatchError as e:
        return str(e)
    return "no error"


def test_k3_devices_in_different_steps_are_told_apart(pool: Pool) -> None:
    for rank, text in enumerate(pool.run(ahead, 2)):
        assert f"test/{rank} summed step {rank}, bucket 0, while test/{1 - rank} was in another" in text
        assert "EV402" in text


def deserted(rank: int, world_size: int) -> tuple[str, float]:
    """Device 1 fails after step 0 and leaves; how long device 0 takes to know, in step 1."""
    case = Case(micro_batches=((6,), (2,)))
    device = Device(rank, world_size, case)
    batches = global_batches(case)
    device.step(0, list(case.micro_batches), batches[0])
    if rank == 1:
        raise RuntimeError("scripted")
    began_s = time.monotonic()
    try:
        device.step(1, list(case.micro_batches), batches[1])
    except PeerLostError as e:
        return str(e), time.monotonic() - began_s
    return "no error", 0.0


def test_a_device_that_leaves_is_noticed_at_once(pool: Pool) -> None:
    stayed, left = pool.outcomes(deserted, 2)
    assert left.error_type == "RuntimeError" and "scripted" in left.error
    text, seconds = stayed.value
    assert "the sum of step 1, " in text and "EV401" in text
    assert seconds < 5
