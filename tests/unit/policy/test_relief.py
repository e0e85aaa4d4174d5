"""Smaller micro-batches or recompute, by what each costs; and what is left when neither helps."""

import pytest
from msgspec.structs import replace

from benchmarks.random_plans import stage
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Prediction
from evener.core.profile import Layer, Profile, Timing
from evener.cost.evaluate import CostModel, evaluate
from evener.policy.relief import relieve
from tests.unit.cost.test_actions import figure

FIRST, SECOND = "h/0", "h/1"


def profile(fixed_s: float) -> Profile:
    """Two layers of 1 + 2 ms a sample and `fixed_s` an action, 1 MB saved a sample, tiny parameters."""
    layers = tuple(
        Layer(name=n, num_params=1, param_bytes=1_000, saved_bytes_per_sample=1_000_000) for n in "ab"
    )
    timings = tuple(
        Timing(
            layer=n,
            kind="k",
            micro_batch=b,
            forward_s=figure(fixed_s + 1e-3 * b),
            backward_s=figure(fixed_s + 2e-3 * b),
        )
        for n in "ab"
        for b in (1, 2, 4, 8)
    )
    return Profile(model="m", layers=layers, timings=timings)


def model(fixed_s: float, memory: float = 12e6) -> CostModel:
    devices = tuple(Device(name=n, kind="k", memory_bytes=figure(memory)) for n in (FIRST, SECOND))
    return CostModel(fleet=Fleet(devices=devices), profile=profile(fixed_s))


def pipeline(micro_batch: int = 8, samples: int = 32) -> Plan:
    stages = (stage("a", (FIRST, micro_batch)), stage("b", (SECOND, micro_batch)))
    only = Pipeline(samples=samples, micro_batch=micro_batch, stages=stages)
    return Plan(global_batch=samples, pipelines=(only,), schedule="1f1b")


def test_cheap_actions_are_made_smaller():
    """Two micro-batches of 8 MB in flight, 12 MB of memory; the bubble shrinks with micro-batches of 4."""
    found = relieve(pipeline(), [FIRST], model(0.0))
    assert found.do == "micro-batches"
    (made,) = found.plan.pipelines
    assert made.micro_batch == 4 and not any(s.recompute for s in made.stages)
    assert found.why.startswith(f"{FIRST} ran out of memory with micro-batch 8; all redo the step, ")
    assert "recompute" in found.why and "MiB on h/0" in found.why


def test_where_actions_cost_much_by_themselves_it_recomputes():
    found = relieve(pipeline(), [FIRST], model(0.05))
    assert found.do == "recompute"
    (made,) = found.plan.pipelines
    assert made.micro_batch == 8 and [s.recompute for s in made.stages] == [True, False]
    assert "recompute in stage 0" in found.why


def test_the_faster_way_that_is_chosen_is_the_one_the_judge_prices_lower():
    for fixed_s in (0.0, 0.002, 0.01, 0.05):
        priced = model(fixed_s)
        found = relieve(pipeline(), [FIRST], priced)
        ways = [relieve(pipeline(), [FIRST]).plan, relieve(pipeline(1), [FIRST]).plan]
        recomputed = replace(ways[1].pipelines[0].stages[0], shares=pipeline().pipelines[0].stages[0].shares)
        stages = (recomputed, pipeline().pipelines[0].stages[1])
        again = replace(pipeline(), pipelines=(replace(pipeline().pipelines[0], stages=stages),))
        seconds = {"micro-batches": evaluate(priced, ways[0]).step_s}
        seconds["recompute"] = evaluate(priced, again).step_s
        assert found.do == min(seconds, key=lambda k: seconds[k]), (fixed_s, seconds)


def test_without_prices_micro_batches_shrink():
    found = relieve(pipeline(), [FIRST])
    assert found.do == "micro-batches" and "not priced" in found.why


def test_with_one_sample_at_a_time_recompute_is_left():
    assert relieve(pipeline(1), [FIRST]).do == "recompute"


@pytest.mark.parametrize("plan", [pipeline(1), pipeline(8, samples=8)])
def test_recompute_frees_nothing_where_one_micro_batch_is_in_flight(plan):
    """The last stage of 1F1B has one in flight, and a pipeline of one micro-batch everywhere."""
    short = SECOND if plan.pipelines[0].micro_batch == 1 else FIRST
    found = relieve(plan, [short])
    assert found.do == ("keep" if short == SECOND else "micro-batches")
    if found.do == "keep":
        assert (
            found.plan == plan and found.why == f"{SECOND} runs out of memory even with one sample at a time"
        )


def test_all_that_ran_out_must_be_helped():
    assert relieve(pipeline(1), [FIRST, SECOND]).do == "keep"
    assert relieve(pipeline(2), [FIRST, SECOND]).do == "micro-batches"


def test_the_prediction_goes_with_the_plan():
    told = Prediction(step_s=1.0, lower_s=0.9, upper_s=1.2, memory_bytes={FIRST: 1})
    priced = model(0.05)
    found = relieve(replace(pipeline(), prediction=told), [FIRST], priced)
    expected = evaluate(priced, found.plan)
    made = found.plan.prediction
    assert made is not None and made.step_s == pytest.approx(expected.step_s)
    assert made.lower_s <= made.step_s <= made.upper_s
    assert made.memory_bytes[FIRST] == round(expected.memory_bytes[FIRST])
    assert found.plan.prediction.seconds[FIRST]["compute"] == pytest.approx(
        expected.seconds[FIRST]["compute"]
    )


def test_rows_of_tables_stay_in_the_prediction_and_leave_less_room():
    """The plan was told 3 MB more than its layers take: they stay whichever way is gone."""
    priced = model(0.05)
    now = evaluate(priced, pipeline()).memory_bytes
    told = Prediction(
        step_s=1, lower_s=1, upper_s=1, memory_bytes={n: round(b) + 3_000_000 for n, b in now.items()}
    )
    found = relieve(replace(pipeline(), prediction=told), [FIRST], priced)
    made = found.plan.prediction
    assert made is not None
    assert made.memory_bytes[FIRST] == pytest.approx(
        evaluate(priced, found.plan).memory_bytes[FIRST] + 3e6, abs=1
    )
    tight = model(0.05, memory=evaluate(priced, found.plan).memory_bytes[FIRST] + 1e6)
    assert relieve(pipeline(), [FIRST], tight).do == "recompute"
    assert relieve(replace(pipeline(), prediction=told), [FIRST], tight).do != found.do
