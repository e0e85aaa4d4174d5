"""Which rows can pool BatchNorm over waves, and what is said of those that cannot."""

import random

from benchmarks.random_plans import random_plan, stage
from evener.core.actions import parse_schedule
from evener.core.plan import Pipeline, Plan
from evener.core.routes import Routes
from evener.schedules import check, make
from evener.schedules.waves import wave_deadlock
from tests.unit.schedules.plans import chain, data_parallel

HYBRID = Plan(
    global_batch=6,
    pipelines=(
        Pipeline(samples=3, micro_batch=1, stages=(stage("a", ("h/0", 1)), stage("b", ("h/1", 1)))),
        Pipeline(samples=3, micro_batch=1, stages=(stage("ab", ("h/2", 1)),)),
    ),
)
LAYERS = {0: ("a.norm",), 1: ("b.norm",), 2: ("a.norm", "b.norm")}
IN_WAVES = parse_schedule(
    "h/0: 0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2 0REDUCE_GRAD STEP\n"
    "h/1: 1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2 1REDUCE_GRAD STEP\n"
    "h/2: 2F0 2F1 2F2 2B0 2B1 2B2 2REDUCE_GRAD STEP\n"
)


def test_data_parallel_can_whatever_the_numbers_of_micro_batches() -> None:
    plan = data_parallel(8, 2, 5)
    layers = dict.fromkeys(range(3), ("a.norm", "b.norm"))
    assert wave_deadlock(make(plan), plan, layers) == ""


def test_one_pipeline_can_under_every_schedule() -> None:
    plan = chain(["h/0", "h/1", "h/2"], 4)
    for name in ("gpipe", "1f1b", "zero-bubble"):
        layers = {0: ("a.norm",), 2: ("c.norm", "c.other")}
        assert wave_deadlock(make(plan, name=name), plan, layers) == ""


def test_pipelines_of_other_depth_cannot_under_1f1b() -> None:
    said = wave_deadlock(make(HYBRID, name="1f1b"), HYBRID, LAYERS)
    assert said == "devices wait for each other in BatchNorm: h/0 at 0F1, h/1 at 1RECV_F1, h/2 at 2B0"
    assert wave_deadlock(make(HYBRID, name="1f1b"), HYBRID, {}) == ""


def test_pipelines_of_other_depth_can_with_all_forwards_first() -> None:
    assert wave_deadlock(IN_WAVES, HYBRID, LAYERS) == ""


def test_gpipe_in_waves_is_that_order() -> None:
    assert make(HYBRID, in_waves=True) == IN_WAVES
    plan = data_parallel(8, 2, 5)
    assert make(plan, in_waves=True) == make(plan)


def test_gpipe_in_waves_never_waits_for_itself_but_on_a_device_that_would_meet_itself() -> None:
    """With a BatchNorm in every layer of random plans: cuts, maps, shared stages and sizes of all kinds."""
    met = 0
    for seed in range(150):
        plan = random_plan(random.Random(seed))
        routes = Routes(plan)
        schedule = make(plan, name="gpipe", in_waves=True)
        if any(r.num_stages > 1 for r in routes.stages):
            assert check(schedule, plan) == []
        work = [
            (layer, m, d) for d in routes.devices for s, m in routes.work(d) for layer in layers_of(routes, s)
        ]
        if len(set(work)) == len(work):
            met += 1
            layers = {r.number: r.stage.layers for r in routes.stages}
            assert wave_deadlock(schedule, plan, layers) == "", plan
    assert met >= 40


def layers_of(routes: Routes, number: int) -> tuple[str, ...]:
    return routes.stages[number].stage.layers


def test_halves_of_a_backward_cannot_meet() -> None:
    said = wave_deadlock(make(HYBRID, name="zero-bubble"), HYBRID, LAYERS)
    assert said == "BatchNorm meets once in a whole backward, and h/0 runs 0I0, half of one"


def test_a_device_cannot_meet_itself() -> None:
    first, second = (Pipeline(samples=1, micro_batch=1, stages=(stage("a", ("h/0", 1)),)) for _ in range(2))
    plan = Plan(global_batch=2, pipelines=(first, second))
    assert "h/0 at" in wave_deadlock(make(plan), plan, {0: ("a.norm",), 1: ("a.norm",)})
