"""What accelerators copy to their hosts and back in plans with owners, by hand."""

import numpy as np
import pytest
from msgspec.structs import replace

from evener.core.figures import line
from evener.core.fleet import REHEARSED, Device, Fleet, Link
from evener.core.plan import Held
from evener.core.routes import Routes
from evener.cost.actions import plan_costs
from evener.cost.evaluate import evaluate
from evener.cost.model import CostModel
from evener.cost.owned import play_owned
from evener.cost.owned_copies import copies_of
from evener.schedules.make import make
from evener.schedules.timing import times
from tests.unit.cost.test_owned import MB, plan_of, profile_of
from tests.unit.cost.test_owned_stages import NAMES, hybrid


def cards(rate: float = 10 * MB, latency_s: float = 1e-9, link_s: float = 1e-9) -> Fleet:
    """Four cards with a link each to their host, and `link_s` for any message between two."""
    devices = tuple(Device(name=n, kind="k", type=REHEARSED) for n in NAMES)
    to_host = tuple(Link(a="a", b=n, curve=line(latency_s, rate)) for n in NAMES)
    return Fleet(devices=devices, links=(Link(a="a", b="a", curve=line(link_s, 1e15)), *to_host))


def test_copies_of_parts_3_to_1_of_8_mb() -> None:
    """1 ms + 1 GB/s: all of it 9 ms, three quarters 7 ms, a quarter 3 ms; an empty unit takes nothing."""
    parts = {"a/0": np.array([0.75, 0.75, 1.0]), "a/1": np.array([0.25, 0.25, 0.0])}
    sizes = np.array([8.0 * MB, 0.0, 8.0 * MB])
    found = copies_of(cards(rate=1e9, latency_s=1e-3), parts, sizes, sizes)
    assert found["a/0"].out == pytest.approx([9e-3, 0, 9e-3])
    assert found["a/0"].home == pytest.approx([7e-3, 0, 9e-3]) == found["a/0"].spread
    assert found["a/0"].into == pytest.approx([3e-3, 0, 0])
    assert found["a/1"].home == pytest.approx([3e-3, 0, 0])
    assert found["a/1"].into == pytest.approx([7e-3, 0, 9e-3])
    assert found["a/0"].step_s == pytest.approx(32e-3)
    assert found["a/0"].left_s == pytest.approx([9e-3, 9e-3, 0]), "the last one leaves when the step ends"


def test_a_cpu_copies_nothing() -> None:
    sizes, half = np.array([8.0 * MB]), np.array([0.5])
    cpus = replace(cards(), devices=tuple(replace(d, type="cpu") for d in cards().devices))
    for found in copies_of(cpus, {"a/0": half, "a/1": half}, sizes, sizes).values():
        assert found.step_s == 0 and not (found.out.any() or found.into.any())


@pytest.mark.parametrize(("held", "outs"), [("optimizer", 1), ("gradients", 3), ("parameters", 3)])
def test_who_is_alone_copies_gradients_and_no_values(held: Held, outs: int) -> None:
    """Sums are made on the host: 10 MB out, 1 s, in one or each of three backwards, and 1 s home."""
    profile = profile_of(10 * MB)
    told = play_owned(CostModel(fleet=cards(), profile=profile), plan_of(profile, (3,), (1,), held))
    assert told.step_s == pytest.approx(9 + outs + 1 + 0.1, rel=1e-4)
    assert told.seconds["a/0"]["transfer"] == pytest.approx(outs, rel=1e-3)


@pytest.mark.parametrize(
    ("held", "samples", "step_s"),
    [
        # 5 MB in, 3 s of compute, 10 MB out; then 5 MB home, half of an update of 0.1 s, 5 MB to the host
        ("optimizer", 1, 0.5 + 3 + 1 + 0.5 + 0.05 + 0.5),
        ("optimizer", 2, 0.5 + 6 + 1 + 0.5 + 0.05 + 0.5),
        ("gradients", 2, 0.5 + 6 + 2 + 0.5 + 0.05 + 0.5),  # out after each backward
        ("parameters", 2, 1.0 + 6 + 2 + 0.5 + 0.05 + 0.5),  # and in before each forward
    ],
)
def test_a_step_of_two_cards_of_one_stage(held: Held, samples: int, step_s: float) -> None:
    """A layer of 10 MB in halves, links between cards that take no time, 10 MB/s to the host."""
    profile = profile_of(10 * MB)
    model, plan = CostModel(fleet=cards(), profile=profile), plan_of(profile, (samples,) * 2, (1, 1), held)
    told = play_owned(model, plan)
    assert told.step_s == pytest.approx(step_s, rel=1e-4)
    played = times(make(plan), Routes(plan), plan_costs(model, plan))
    assert played.barrier_s == pytest.approx(told.step_s), "as it is simulated"
    for causes in told.seconds.values():
        assert sum(causes.values()) == pytest.approx(told.step_s)
        assert causes["compute"] == pytest.approx(3 * samples)
        assert causes["transfer"] == pytest.approx(step_s - 3 * samples - 1.05, rel=1e-3)


def test_values_of_the_first_units_come_while_the_owner_copies_the_next_ones() -> None:
    """Two units of 10 MB in halves: the first left 0.5 s before the step's end, and comes within those.

    0.5 s a unit on the link and 0.5 s in: the first is there, the second 0.5 s after the step's end.
    """
    profile = profile_of(10 * MB, 10 * MB)
    slow = replace(cards(), links=(Link(a="a", b="a", curve=line(1e-9, 10 * MB)), *cards().links[1:]))
    plan = plan_of(profile, (1, 1), (1, 1), "optimizer")
    told = play_owned(CostModel(fleet=slow, profile=profile), plan)
    assert told.gather_s["a/0"] == (pytest.approx((0.5 + 0.5, 2.0), rel=1e-3),)


@pytest.mark.parametrize("held", ["gradients", "parameters"])
def test_copies_are_made_where_the_wire_takes_no_time(held: Held) -> None:
    """Cards without a link between them: as with one that takes none."""
    profile = profile_of(10 * MB, 10 * MB, 10 * MB)
    plan = plan_of(profile, (2, 2), (1, 1), held)
    fleets = cards(), replace(cards(), links=cards().links[1:])
    steps = [play_owned(CostModel(fleet=fleet, profile=profile), plan).step_s for fleet in fleets]
    assert steps[1] == pytest.approx(steps[0], rel=1e-4)


@pytest.mark.parametrize(("held", "outs"), [("optimizer", [0, 0, 1]), ("gradients", [1, 1, 1])])
def test_copies_where_pipelines_cut_the_model(held: Held, outs: list[float]) -> None:
    """Layers of 10 MB in halves, three micro-batches of 1 s and 2 s: 5 MB in once, 10 MB out a backward.

    The step: 0.5 s home, half an update, 0.5 s to the host; 0.5 in before each of the first forwards, then
    compute, and what a stage's copies keep the other one from.
    """
    model = CostModel(fleet=cards(), profile=profile_of(10 * MB, 10 * MB))
    plan = hybrid(held, 1, 1, 1, 1, samples=3)
    costs = plan_costs(model, plan)
    assert costs.update_s["a/0"] == pytest.approx(0.5 + 0.05 + 0.5)
    assert [costs.gather_s.get((0, "a/0", "B", m), 0.0) for m in range(3)] == pytest.approx(outs)
    assert costs.gather_s[0, "a/0", "F", 0] == pytest.approx(0.5 - model.trainer.step_s, abs=1e-3)
    told = evaluate(model, plan)
    assert all(sum(row.values()) == pytest.approx(told.step_s) for row in told.seconds.values())
