"""torch.distributed.pipelining has the same orders and sends the same messages, where it can run the map."""

import pytest

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

from evener.schedules import make  # noqa: E402
from tests.unit.schedules.plans import chain  # noqa: E402


def computing(schedule) -> dict[int, list[str]]:
    return {
        i: [str(a) for a in row if a.type in ("F", "B", "I", "W")]
        for i, row in enumerate(schedule.actions.values())
    }


def torchs_interleaved(num_devices: int, stages_each: int, num_micro_batches: int) -> dict[int, list[str]]:
    its = object.__new__(schedules.ScheduleInterleaved1F1B)
    its.pp_group_size, its.n_local_stages = num_devices, stages_each
    its._n_microbatches, its.microbatches_per_round = num_micro_batches, num_devices
    rows = {rank: its._calculate_single_rank_operations(rank) for rank in range(num_devices)}
    return {rank: [str(a) for a in row if a is not None] for rank, row in rows.items()}


@pytest.mark.parametrize(
    ("num_devices", "stages_each", "num_micro_batches"), [(2, 2, 4), (2, 3, 6), (4, 2, 8), (3, 2, 3)]
)
def test_interleaved(num_devices, stages_each, num_micro_batches):
    devices = [f"h/{i}" for i in range(num_devices)] * stages_each
    ours = computing(make(chain(devices, num_micro_batches), name="interleaved"))
    assert ours == torchs_interleaved(num_devices, stages_each, num_micro_batches)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble", "interleaved"])
@pytest.mark.parametrize("devices", [("0", "1", "2"), ("0", "1", "0", "1"), ("0", "1", "1", "0")])
def test_it_accepts_our_rows_and_sends_the_same(name, devices):
    plan = chain([f"h/{d}" for d in devices], 4)
    ours = make(plan, name=name)
    of_device = {stage: int(d) for stage, d in enumerate(devices)}
    rows = {rank: [schedules._Action.from_str(a) for a in row] for rank, row in computing(ours).items()}
    schedules._validate_schedule(rows, len(rows), len(devices), 4)
    lowered = schedules._add_send_recv(rows, of_device.__getitem__, len(devices))
    theirs = {
        r: sorted(str(a) for a in row if "SEND" in str(a) or "RECV" in str(a)) for r, row in lowered.items()
    }
    sent = {
        i: sorted(str(a) for a in row if a.type.startswith(("SEND", "RECV")))
        for i, row in enumerate(ours.actions.values())
    }
    assert sent == theirs
