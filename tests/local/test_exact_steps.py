"""Steps on unequal shares give what one device gives: K1, K2 and K3, clipping and loss scaling included."""

from functools import partial

import pytest
import torch

from tests.local.pool import Pool
from tests.local.training import Case, DeviceRun, plain, run_steps
from tests.reference import PlainRun, relative_error

SPLITS = {
    "6/2": ((6,), (2,)),
    "7/1": ((7,), (1,)),
    "8/0": ((8,), ()),
    "5/2/1": ((5,), (2,), (1,)),
}


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def check(runs: list[DeviceRun], want: PlainRun, dtype: torch.dtype) -> None:
    """Every device has the plain loop's gradients, losses and norms, and parameters equal to the bit."""
    limit = 1e-12 if dtype == torch.float64 else 1e-6
    for run in runs:
        assert len(run.applied) == len(want.gradients)
        for attempt, gradients, loss, norm in zip(
            run.applied, want.gradients, want.losses, want.norms, strict=True
        ):
            assert relative_error(attempt.gradients, gradients) <= limit
            assert attempt.loss == pytest.approx(loss, rel=limit)
            assert attempt.norm is None or attempt.norm == pytest.approx(norm, rel=limit)
        assert relative_error(run.parameters, want.parameters) <= limit
        assert all(torch.equal(a, b) for a, b in zip(run.parameters, runs[0].parameters, strict=True))
        assert [t.checksum for t in run.tries] == [t.checksum for t in runs[0].tries]


@pytest.mark.parametrize("split", SPLITS)
def test_k1_unequal_shares_of_a_mean_loss(pool: Pool, split: str, dtype: torch.dtype) -> None:
    case = Case(micro_batches=SPLITS[split], dtype=dtype)
    check(run_steps(pool, case), plain(case), dtype)


@pytest.mark.parametrize("split", ["6/2", "5/2/1"])
def test_k1_a_loss_given_as_a_sum(pool: Pool, split: str, dtype: torch.dtype) -> None:
    case = Case(micro_batches=SPLITS[split], dtype=dtype, reduction="sum")
    check(run_steps(pool, case), plain(case), dtype)


K2_MASKS = {"1 and 3 valid": (1, 2, 3, 4), "none valid on the first": (0, 1, 2, 3, 5)}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mask", K2_MASKS)
def test_k2_masked_labels_count_by_valid_label(
    pool: Pool, mask: str, reduction: str, dtype: torch.dtype
) -> None:
    case = Case(micro_batches=((4,), (4,)), masked=K2_MASKS[mask], reduction=reduction, dtype=dtype)
    runs = run_steps(pool, case)
    check(runs, plain(case), dtype)


def test_k2_a_device_without_any_sample(pool: Pool, dtype: torch.dtype) -> None:
    case = Case(micro_batches=((3, 1), (), (4,)), masked=(1, 2, 3, 4), dtype=dtype)
    check(run_steps(pool, case), plain(case), dtype)


def test_k2_a_last_micro_batch_without_valid_label(pool: Pool, dtype: torch.dtype) -> None:
    case = Case(micro_batches=((3, 2), (2, 1)), masked=(3, 4, 7), dtype=dtype)
    check(run_steps(pool, case), plain(case), dtype)


@pytest.mark.parametrize("several_buckets", [True, False], ids=["a bucket each", "one bucket"])
def test_k3_unequal_numbers_of_micro_batches(pool: Pool, several_buckets: bool, dtype: torch.dtype) -> None:
    case = Case(micro_batches=((4, 4, 2), (2,)), dtype=dtype, several_buckets=several_buckets)
    check(run_steps(pool, case), plain(case), dtype)


def test_adam_and_weight_decay_in_float64(pool: Pool) -> None:
    case = Case(
        micro_batches=((3, 2), (1,)),
        steps=6,
        dtype=torch.float64,
        optimizer=partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    )
    runs, want = run_steps(pool, case), plain(case)
    assert relative_error(runs[1].parameters, want.parameters) <= 1e-10
    assert max(map(relative_error, [t.gradients for t in runs[0].applied], want.gradients)) <= 1e-10


@pytest.mark.parametrize("max_norm", [1.0, 1e3], ids=["clips", "leaves alone"])
def test_one_clip_norm_over_all_devices(pool: Pool, max_norm: float, dtype: torch.dtype) -> None:
    case = Case(micro_batches=((5,), (2,), (1,)), loss_factor=10.0, max_norm=max_norm, dtype=dtype)
    want = plain(case)
    assert all((norm > max_norm) == (max_norm == 1.0) for norm in want.norms), "the case shows nothing"
    check(run_steps(pool, case), want, dtype)


def test_a_loss_scale_leaves_gradients_as_they_are(pool: Pool, dtype: torch.dtype) -> None:
    # A power of two, as always in practice: torch's scaler keeps the inverse of others in float32 only.
    case = Case(micro_batches=((4, 2), (2,)), loss_scale=1024.0, dtype=dtype)
    check(run_steps(pool, case), plain(case), dtype)


def test_the_clip_norm_is_that_of_unscaled_gradients(pool: Pool, dtype: torch.dtype) -> None:
    case = Case(micro_batches=((4, 2), (2,)), loss_scale=1024.0, max_norm=0.1, dtype=dtype)
    check(run_steps(pool, case), plain(case), dtype)


def test_a_loss_scale_on_a_device_without_samples(pool: Pool) -> None:
    case = Case(micro_batches=((6,), ()), loss_scale=1024.0)
    assert relative_error(run_steps(pool, case)[1].parameters, plain(case).parameters) <= 1e-6
