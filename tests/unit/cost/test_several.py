"""Devices with several stages: the judge of plans against hand-made cases and the event simulator."""

import random
from itertools import pairwise

import pytest

from benchmarks.random_plans import stage
from evener.core.fleet import Fleet
from evener.core.plan import Pipeline, Plan
from evener.cost.evaluate import CostModel, evaluate, pipeline_cost
from evener.cost.several import run_several
from evener.cost.trainer import Trainer
from evener.errors import UsageError
from evener.schedules import make
from evener.sim import plan_costs, simulate
from tests.unit.cost.test_actions import fleet, one_pipeline, profile

UNLINKED = Fleet(devices=fleet().devices)


def there_and_back(**more) -> Plan:
    """Layers a, b..c and d on y/0, x/0, y/0: the slow device has both ends."""
    cut = one_pipeline(stage("a", ("y/0", 4)), stage("bc", ("x/0", 4)), stage("d", ("y/0", 4)))
    return Plan(global_batch=16, pipelines=cut.pipelines, schedule="1f1b", **more)


def test_two_stages_of_a_device_take_turns():
    """a and d take (1 + 4) · 3 ms a sample: 16 samples are 240 ms of y/0, however fast x/0 is."""
    model = CostModel(fleet=UNLINKED, profile=profile(whole=False))
    cost = evaluate(model, there_and_back())
    assert cost.seconds["y/0"]["compute"] == pytest.approx(0.240)
    assert cost.step_s >= 0.240
    assert cost.step_s == pytest.approx(sum(cost.seconds["y/0"].values()))
    assert cost.step_s == pytest.approx(sum(cost.seconds["x/0"].values()))
    assert cost.seconds["y/0"]["optimizer"] == pytest.approx(2e-4), "its two layers, once"


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero-bubble"])
def test_it_takes_what_the_simulator_says_of_the_plans_own_schedule(schedule):
    plan = Plan(global_batch=16, pipelines=there_and_back().pipelines, schedule=schedule)
    model = CostModel(fleet=fleet(), profile=profile())
    costs = plan_costs(model, plan)
    played = simulate(make(plan, costs=costs), plan, costs)
    assert evaluate(model, plan).step_s == pytest.approx(played.step_s, rel=1e-9)


def random_plan(rng: random.Random) -> Plan:
    """One or two pipelines of a..d over three devices, at least one of which has two stages."""
    while True:
        pipelines = []
        for _ in range(rng.choice((1, 1, 2))):
            cuts = sorted(rng.sample((1, 2, 3), k=rng.randint(0, 3)))
            size = rng.randint(1, 4)
            names = ("x/0", "x/1", "y/0")
            stages = tuple(
                stage("abcd"[low:high], (rng.choice(names), size)) for low, high in pairwise([0, *cuts, 4])
            )
            pipelines.append(Pipeline(samples=rng.randint(size, 12), micro_batch=size, stages=stages))
        if run_several(pipelines):
            total = sum(p.samples for p in pipelines)
            return Plan(global_batch=total, pipelines=tuple(pipelines), schedule="1f1b")


def test_random_plans_take_what_the_simulator_says():
    rng = random.Random(0)
    for _ in range(60):
        plan = random_plan(rng)
        model = CostModel(fleet=fleet(), profile=profile(whole=rng.random() < 0.5))
        costs = plan_costs(model, plan)
        played = simulate(make(plan), plan, costs)
        assert evaluate(model, plan).step_s == pytest.approx(played.step_s, rel=1e-6), plan


def test_a_pipeline_alone_is_priced_as_its_plan():
    model = CostModel(fleet=UNLINKED, profile=profile())
    plan = there_and_back()
    assert pipeline_cost(model, plan.pipelines[0]).end_s == pytest.approx(evaluate(model, plan).step_s)


def test_a_device_holds_the_layers_of_all_its_stages_once():
    """Parameters and gradients of 3 MB a layer; y/0 keeps three micro-batches of a and one of d."""
    model = CostModel(fleet=UNLINKED, profile=profile(whole=False))
    held = evaluate(model, there_and_back()).memory_bytes
    assert held["y/0"] == pytest.approx(2 * 6e6 + 6e6 + 4 * 4 * 5_000 + 2 * 2 * 4 * 1_000, rel=0.01)
    twice = tuple(Pipeline(samples=4, micro_batch=4, stages=(stage("abcd", ("y/0", 4)),)) for _ in range(2))
    whole = evaluate(model, Plan(global_batch=4, pipelines=twice[:1], schedule="1f1b")).memory_bytes["y/0"]
    both = evaluate(model, Plan(global_batch=8, pipelines=twice, schedule="1f1b")).memory_bytes["y/0"]
    assert both == pytest.approx(whole), "one micro-batch after the other, on the same parameters"


def test_what_cannot_be_priced_is_refused():
    model = CostModel(fleet=UNLINKED, profile=profile(), trainer=Trainer(blocking_sends=True))
    with pytest.raises(UsageError, match="several stages"):
        evaluate(model, there_and_back())
