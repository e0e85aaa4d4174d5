import random

import pytest

from benchmarks.random_plans import stage
from benchmarks.unequal_schedule import row
from evener.core.figures import line
from evener.core.plan import Pipeline, Plan
from evener.errors import ScheduleError
from evener.schedules import check, make
from evener.schedules.costs import Costs, Memory, Wire
from evener.sim import simulate, step_seconds
from tests.unit.schedules.exhaustive import shortest_s
from tests.unit.schedules.plans import chain, stage_costs


def without_split(costs: Costs) -> Costs:
    return Costs(
        compute_s={k: v for k, v in costs.compute_s.items() if k[2] in "FB"},
        wires=costs.wires,
        output_bytes=costs.output_bytes,
    )


@pytest.mark.parametrize(
    ("num_stages", "num_micro_batches", "kinds", "count"),
    [(2, 4, "FB", 6), (2, 2, "FIW", 6), (3, 2, "FIW", 4)],
)
def test_against_every_order_of_tiny_plans(num_stages, num_micro_batches, kinds, count):
    """Within 2 % of the best order on each, and the best on nearly all."""
    rng = random.Random(num_stages)
    ratios = []
    for _ in range(count):
        plan = chain([f"h/{i}" for i in range(num_stages)], num_micro_batches)
        wires = {
            (a, b): Wire(curve=line(rng.uniform(0.01, 0.3), 1e9))
            for a in plan.devices
            for b in plan.devices
            if a != b
        }
        costs = stage_costs(plan, {s: rng.uniform(1, 4) for s in range(num_stages)}, wires=wires)
        if kinds == "FB":
            costs = without_split(costs)
        found = step_seconds(make(plan, name="unequal", costs=costs), plan, costs)
        ratios.append(found / shortest_s(plan, costs, kinds, num_stages))
    assert min(ratios) >= 1 - 1e-12, "shorter than the best of all orders"
    assert max(ratios) <= 1.02
    assert sum(r <= 1 + 1e-9 for r in ratios) >= count - 1


def test_never_slower_than_the_fixed_ones_and_faster_than_1f1b():
    plan = chain(["h/0", "h/1", "h/2"], 6)
    costs = stage_costs(plan, {0: 1.0, 1: 3.0, 2: 2.0})
    seconds = {
        n: step_seconds(make(plan, name=n, costs=costs), plan, costs)
        for n in ("1f1b", "zero-bubble", "unequal")
    }
    assert seconds["unequal"] <= seconds["zero-bubble"] < seconds["1f1b"]


@pytest.mark.parametrize("room", [1, 2, 3])
def test_memory_is_respected(room):
    """`room` micro-batches of 10 bytes fit each device, whatever would be faster."""
    plan = chain(["h/0", "h/1", "h/2", "h/0"], 6)
    memory = {
        d: Memory(limit_bytes=100.0 + 20 * room, fixed_bytes=100.0, saved_bytes=dict.fromkeys(range(4), 10.0))
        for d in plan.devices
    }
    costs = stage_costs(plan, {0: 1.0, 1: 3.0, 2: 2.0, 3: 1.0}, memory=memory)
    schedule = make(plan, name="unequal", costs=costs)
    assert check(schedule, plan) == []
    assert max(simulate(schedule, plan, costs).peak_bytes.values()) <= 100 + 20 * room


@pytest.mark.parametrize("seed", range(3))
def test_the_benchmarks_instances_are_never_worse(seed):
    """Idle devices on a cut that cannot be balanced; memory is checked inside."""
    share = row(seed)["bubble_share"]
    assert share["unequal"] <= min(share.values()) + 1e-9
    assert share["unequal"] < share["1f1b"]


def test_more_memory_is_never_slower():
    plan = chain(["h/0", "h/1", "h/2"], 6)
    seconds = []
    for room in (1, 2, 6):
        memory = {
            d: Memory(limit_bytes=10.0 * room, saved_bytes=dict.fromkeys(range(3), 10.0))
            for d in plan.devices
        }
        costs = stage_costs(plan, {0: 1.0, 1: 3.0, 2: 2.0}, memory=memory)
        seconds.append(step_seconds(make(plan, name="unequal", costs=costs), plan, costs))
    assert seconds[0] > seconds[1] >= seconds[2]


def test_not_even_one_micro_batch_fits():
    plan = chain(["h/0", "h/1"], 2)
    memory = {"h/1": Memory(limit_bytes=105.0, fixed_bytes=100.0, saved_bytes={1: 10.0})}
    with pytest.raises(ScheduleError, match="h/1") as caught:
        make(plan, name="unequal", costs=stage_costs(plan, {0: 1.0, 1: 1.0}, memory=memory))
    assert "needs 10 bytes, 5 are free" in caught.value.numbers


def test_pipelines_on_other_devices_are_scheduled_apart():
    """Twice the same pipeline, twice the same rows."""
    pipelines = tuple(
        Pipeline(samples=4, micro_batch=1, stages=(stage("a", (f"h/{i}", 1)), stage("b", (f"h/{i + 1}", 1))))
        for i in (0, 2)
    )
    plan = Plan(global_batch=8, pipelines=pipelines)
    costs = stage_costs(plan, {0: 1.0, 1: 2.0, 2: 1.0, 3: 2.0})
    rows = make(plan, name="unequal", costs=costs).actions
    shift = {0: 2, 1: 3}
    for mine, other in (("h/0", "h/2"), ("h/1", "h/3")):
        moved = [(a.type, None if a.stage is None else shift[a.stage], a.micro_batch) for a in rows[mine]]
        assert moved == [(a.type, a.stage, a.micro_batch) for a in rows[other]]
