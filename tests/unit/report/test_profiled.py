"""Use and communication from one profiled step, worked by hand."""

import pytest

from evener.errors import FileError
from evener.report import profiled
from evener.report.profiled import (
    DeviceProfile,
    Event,
    clipped,
    from_kineto,
    is_action,
    length,
    merged,
    overlap,
    own_seconds,
    read_profiled,
    union,
    use,
)


def event(name: str, start: float, end: float, category: str = "user_annotation", lane: str = "1") -> Event:
    return Event(name=name, category=category, lane=lane, start_us=start, length_us=end - start)


STEP = (
    event("0F0", 1000, 4000),
    event("INPUT", 1000, 1500),
    event("0B0", 4000, 8000),
    event("STEP", 8000, 11_000),
    event("REDUCE_GRAD", 8000, 10_500),
    event("k", 1500, 4000, "kernel", "s7"),
    event("k", 4000, 7500, "kernel", "s7"),
    event("nccl:all_reduce", 7000, 9000, lane="9"),
    event("ncclDevKernel_AllReduce", 7000, 9000, "kernel", "s9"),
)
GPU = DeviceProfile(device="lab/a", type="cuda", step=4, events=STEP)


def test_use_of_an_accelerator() -> None:
    """10 ms; kernels for 6 ms; messages and waits from 7 to 10.5 ms, the first 0.5 beside a kernel."""
    found = use(GPU)
    assert found.step_s == pytest.approx(10e-3)
    assert found.busy == pytest.approx(0.6)
    assert found.communication == pytest.approx(0.35)
    assert found.exposed == pytest.approx(0.30)
    assert found.operators == (("k", pytest.approx(6e-3), 2),)


def test_use_of_a_cpu_is_that_of_its_operators() -> None:
    events = (
        event("0F0", 0, 1000),
        event("aten::linear", 100, 600, "cpu_op"),
        event("aten::addmm", 200, 500, "cpu_op"),
        event("c10d::allreduce_", 700, 900, "cpu_op"),
    )
    found = use(DeviceProfile(device="lab/c", type="cpu", step=0, events=events))
    assert found.busy == pytest.approx(0.5) and found.communication == pytest.approx(0.2)
    assert {n: s for n, s, _ in found.operators} == pytest.approx(
        {"aten::addmm": 300e-6, "aten::linear": 200e-6}
    )


def test_a_profile_without_actions_is_refused() -> None:
    with pytest.raises(FileError, match="lab/a holds no action"):
        use(DeviceProfile(device="lab/a", type="cuda", step=0, events=STEP[5:]))


def test_what_was_merged_is_read_back() -> None:
    other = DeviceProfile(device="lab/b", type="cpu", step=4, events=STEP[:4], left_out=7)
    raw = merged((GPU, other))
    first, second = read_profiled(raw)
    assert (first.device, first.step, second.left_out) == ("lab/a", 4, 7)
    assert use(first).busy == pytest.approx(use(GPU).busy)
    assert use(first).exposed == pytest.approx(use(GPU).exposed)
    assert b'"actions"' in raw


@pytest.mark.parametrize(
    "raw",
    [b"{}", b"[]", b'{"traceEvents":[{"ph":"X","pid":5}],"otherData":{"profiled":[]}}', b"\xff"],
)
def test_what_is_no_profile_is_an_error(raw: bytes) -> None:
    with pytest.raises(FileError, match="no trace that evener merged"):
        read_profiled(raw)


def kineto(count: int) -> dict:
    actions = [{"ph": "X", "cat": "user_annotation", "name": "0F0", "tid": 1, "ts": 5.0, "dur": 0.1}]
    ops = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mul", "tid": 1, "ts": 5.0 + i, "dur": 1.0 + i}
        for i in range(count)
    ]
    other = [{"ph": "s", "cat": "fwdbwd", "name": "x", "ts": 1}, {"ph": "X", "cat": "Trace", "name": "y"}]
    return {"baseTimeNanoseconds": 2_000_000, "traceEvents": [*ops, *actions, *other]}


def test_torchs_trace_keeps_actions_and_the_longest_events(monkeypatch) -> None:
    monkeypatch.setattr(profiled, "MOST_EVENTS", 3)
    found = from_kineto(kineto(5), device="lab/a", type_="cpu", step=2)
    assert [e.length_us for e in found.events] == [0.1, 4.0, 5.0] and found.left_out == 3
    assert found.events[0].name == "0F0" and found.events[0].start_us == pytest.approx(2005.0)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("2F0", True), ("STEP", True), ("0REDUCE_GRAD", True), ("INPUT", True), ("aten::mm", False)],
)
def test_what_an_action_is(name: str, wanted: bool) -> None:
    assert is_action(event(name, 0, 1)) is wanted
    assert not is_action(event(name, 0, 1, "cpu_op"))


def test_intervals() -> None:
    assert union([(1, 3), (0, 2), (5, 6), (3, 3.5)]) == [(0, 3.5), (5, 6)]
    assert overlap([(0, 3), (4, 9)], [(2, 5), (8, 10)]) == [(2, 3), (4, 5), (8, 9)]
    assert clipped([(0, 3), (5, 9)], 2, 6) == [(2, 3), (5, 6)] and length([(2, 3), (5, 7)]) == 3


def test_own_seconds_are_by_lane() -> None:
    nested = [event("out", 0, 10, "cpu_op"), event("in", 2, 6, "cpu_op"), event("in", 1, 3, "cpu_op", "2")]
    assert own_seconds(nested) == {"out": (pytest.approx(6e-6), 1), "in": (pytest.approx(6e-6), 2)}
