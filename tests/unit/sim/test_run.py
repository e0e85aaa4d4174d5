import pytest
from msgspec.structs import replace

from benchmarks.random_plans import stage
from evener.core.faults import Fault, parse_faults
from evener.core.plan import Pipeline, Plan
from evener.errors import NoPlanFitsError, UnknownNameError
from evener.schedules import make
from evener.schedules.costs import Costs
from evener.sim import Run, World, play, shrink
from tests.unit.schedules.plans import chain, data_parallel, stage_costs


def costs_of(plan: Plan) -> Costs:
    """3 s a micro-batch on every device, whatever its size."""
    return stage_costs(plan, dict.fromkeys(range(sum(len(p.stages) for p in plan.pipelines)), 3.0))


def run(plan: Plan, faults: str, steps: int, **more) -> Run:
    world = World(
        costs_of=costs_of,
        schedule_of=lambda plan, costs: make(plan, name="1f1b", costs=costs),
        **({"replan": shrink, "recover_s": 0.5} | more),
    )
    return play(plan, world, steps=steps, faults=parse_faults(faults))


def test_steps_follow_one_another():
    played = run(data_parallel(4, 2), "", 3)
    assert played.step_s == pytest.approx((6, 6, 6))
    for device in ("h/0", "h/1"):
        assert sum(played.trace.seconds_by_cause(device).values()) == pytest.approx(18)
    assert {s.step for s in played.trace.spans} == {0, 1, 2}


def test_a_slow_device_stays_slow_or_recovers():
    assert run(data_parallel(4, 4), "slow h/1 x2 at 1", 3).step_s == pytest.approx((6, 12, 12))
    assert run(data_parallel(4, 4), "slow h/1 x2 at 1 for 4s", 3).step_s == pytest.approx((6, 8, 6))
    assert run(data_parallel(4, 4), "slow h/1 x2 at step 0.5", 1).step_s == pytest.approx((9,))


def test_who_leaves_costs_the_step_in_flight_and_its_samples_move():
    played = run(data_parallel(4, 4), "leave h/1 at 1.5", 3)
    assert played.step_s == pytest.approx((6, 3 + 0.5 + 12, 12)), "half a step lost, then 8 samples on h/0"
    assert played.plans[1].samples_by_device() == {"h/0": 8}
    assert played.log == (
        "step 1: leave h/1 at 1.5: 3 s of the step are lost and it is done again; "
        "pipeline 1 ends, the others take its 4 samples",
    )
    assert played.trace.seconds_by_cause("h/0")["overhead"] == pytest.approx(3.5)


def test_a_shared_stage_goes_on_with_the_other_share():
    plan = Plan(
        global_batch=4,
        pipelines=(
            Pipeline(
                samples=4, micro_batch=4, stages=(stage("a", ("h/0", 4)), stage("b", ("h/1", 3), ("h/2", 1)))
            ),
        ),
    )
    changed, why = shrink(plan, Fault(type="leave", device="h/2", at_step=0))
    assert changed.pipelines[0].stages[1] == stage("b", ("h/1", 4))
    assert [x.device for x in changed.left_out] == ["h/2"]
    assert why == "the other shares of its stages take the samples of h/2"


def test_the_example_of_the_documentation():
    changed, _ = shrink(data_parallel(8, 4, 4), Fault(type="leave", device="h/2", at_step=0))
    assert changed.samples_by_device() == {"h/0": 11, "h/1": 5}


def test_a_pipeline_that_loses_a_stage_leaves_its_other_devices_out():
    pipelines = tuple(
        Pipeline(samples=2, micro_batch=1, stages=(stage("a", (f"{h}/0", 1)), stage("b", (f"{h}/1", 1))))
        for h in "xy"
    )
    changed, _ = shrink(
        Plan(global_batch=4, pipelines=pipelines), Fault(type="leave", device="y/1", at_step=0)
    )
    assert changed.devices == ("x/0", "x/1")
    assert {x.device: x.reason for x in changed.left_out} == {"y/1": "left", "y/0": "its pipeline needed y/1"}


def test_no_pipeline_is_left():
    with pytest.raises(NoPlanFitsError, match="without h/1"):
        run(chain(["h/0", "h/1"], 2), "leave h/1 at 0", 1)


def test_out_of_memory_halves_the_micro_batches():
    played = run(data_parallel(4, 4), "oom h/0 at 1", 2)
    assert [p.micro_batch for p in played.plans[1].pipelines] == [1, 2]
    assert played.step_s == pytest.approx((6, 0.5 + 12))
    with pytest.raises(NoPlanFitsError, match="hold one sample"):
        run(data_parallel(4, 4), "oom h/0 at 0; oom h/0 at 1", 2)


def test_who_joins_works_from_the_next_step_on():
    plan = data_parallel(4, 4)
    larger = replace(plan, pipelines=data_parallel(4, 2, 2).pipelines)
    played = run(plan, "join h/2 at 1", 2, replan=lambda plan, fault: (larger, "three now"))
    assert played.step_s == pytest.approx((6, 6))
    assert played.log == ("step 1: join h/2 at 1: three now",)
    assert "h/2" in {s.device for s in played.trace.spans if s.step == 1}
    with pytest.raises(NoPlanFitsError, match="needs a search"):
        run(plan, "join h/2 at 1", 2)


def test_a_fault_that_names_nobody_is_an_error_and_one_that_comes_too_late_is_said():
    with pytest.raises(UnknownNameError, match="'h/7'"):
        run(data_parallel(4, 4), "slow h/7 x2 at 0", 1)
    with pytest.raises(UnknownNameError, match="'lab'"):
        run(data_parallel(4, 4), "cut h|lab at 0 for 1s", 1)
    assert run(data_parallel(4, 4), "leave h/1 at 9", 2).log == ("leave h/1 at 9: not reached in 2 steps",)


def test_many_alike_steps_are_played_once():
    """A thousand steps take the time of one, and end where a thousand would."""
    played = run(chain(["h/0", "h/1"], 4), "slow h/0 x2 at 500", 1000)
    assert len({round(s, 6) for s in played.step_s}) == 2
    assert played.barriers_s[-1] == pytest.approx(sum(played.step_s))
