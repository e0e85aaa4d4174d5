"""Plans with owners played in time: as their price says, and after a device has left."""

import pytest

from evener import schedules
from evener.core.faults import parse_faults
from evener.core.plan import HELD, Held, Plan
from evener.core.trace import CAUSES
from evener.cost.evaluate import evaluate
from evener.cost.model import CostModel
from evener.sim import Run, World, plan_costs, play, shrink
from tests.unit.cost.test_owned import MB, fleet_of, plan_of, profile_of
from tests.unit.cost.test_owned_stages import hybrid, model_of

PROFILE = profile_of(10 * MB, 20 * MB, 5 * MB, update_s=0.2)
MODEL = CostModel(fleet=fleet_of(rate=8 * MB), profile=PROFILE)


def played(plan: Plan, *, steps: int = 2, faults: str = "", model: CostModel = MODEL) -> Run:
    world = World(
        costs_of=lambda p: plan_costs(model, p),
        schedule_of=lambda p, costs: schedules.make(p, name="1f1b", costs=costs),
        replan=shrink,
    )
    return play(plan, world, steps=steps, faults=parse_faults(faults))


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("samples", [(2, 2, 2), (4, 2, 0), (3, 1, 2)])
def test_a_step_lasts_as_long_as_its_price_says(held: Held, samples: tuple[int, ...]) -> None:
    plan = plan_of(PROFILE, samples, (1, 2, 5), held)
    run, told = played(plan), evaluate(MODEL, plan)
    assert run.step_s == pytest.approx([told.step_s] * 2)
    assert run.peak_bytes == pytest.approx(told.memory_bytes)
    for name in plan.devices:
        seconds = run.trace.seconds_by_cause(name)
        assert sum(seconds[c] for c in CAUSES) == pytest.approx(run.barriers_s[-1])
        assert seconds["compute"] == pytest.approx(2 * told.seconds[name]["compute"])
    waits = run.trace.seconds_by_cause("a/0")["transfer"]
    assert waits == pytest.approx(2 * told.seconds["a/0"]["transfer"]) and waits > 0


def test_the_others_share_what_a_lost_device_kept() -> None:
    plan = plan_of(PROFILE, (4, 2, 0), (1, 2, 5), "optimizer")
    run = played(plan, steps=3, faults="leave a/1 at 1")
    after = run.plans[-1]
    assert after.owners[0].parts == {"a/0": 1, "a/2": 5} and after.samples_by_device() == {"a/0": 6, "a/2": 0}
    assert "the other owners share what a/1 kept" in run.log[0]
    halved = played(plan_of(PROFILE, (4, 2, 0), (1, 2, 5), "optimizer", size=2), faults="oom a/0 at 1")
    assert halved.plans[-1].owners == plan.owners and halved.plans[-1].pipelines[0].micro_batch == 1


def test_who_only_kept_state_takes_samples_when_nobody_else_is_left() -> None:
    plan = plan_of(PROFILE, (4, 0, 0), (1, 1, 1), "optimizer")
    assert played(plan, steps=3, faults="leave a/0 at 1").plans[-1].samples_by_device() == {
        "a/1": 2,
        "a/2": 2,
    }


@pytest.mark.parametrize("held", ["optimizer", "gradients"])
@pytest.mark.parametrize("parts", [(1, 1, 1, 1), (3, 0, 1, 2)])
def test_stages_with_owners_last_as_long_as_their_price_says(held: Held, parts: tuple[int, ...]) -> None:
    model, plan = model_of(), hybrid(held, *parts, samples=3)
    told = evaluate(model, plan)
    run = played(plan, model=model)
    assert run.step_s == pytest.approx([told.step_s] * 2)
    if held == "optimizer":  # of gradients in parts, what passes is counted where the plan is judged
        assert run.peak_bytes == pytest.approx(told.memory_bytes)


def test_owners_of_a_pipeline_that_ends_are_those_that_still_hold_the_layer() -> None:
    run = played(hybrid("optimizer", 3, 2, 1, 1), steps=3, faults="leave a/3 at 1", model=model_of())
    after = run.plans[-1]
    assert after.devices == ("a/0", "a/1")
    assert {o.layer: o.parts for o in after.owners} == {"l0": {"a/0": 3}, "l1": {"a/1": 2}}
