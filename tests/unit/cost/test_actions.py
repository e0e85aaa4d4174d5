"""Plan + fleet + profile → costs, against the cost model that the planner uses."""

import pytest

from benchmarks.random_plans import stage
from evener.core.figures import Figure, line
from evener.core.fleet import Device, Fleet, Link
from evener.core.plan import Pipeline, Plan
from evener.core.profile import Layer, Profile, StepTiming, Timing
from evener.cost.evaluate import CostModel
from evener.cost.evaluate import evaluate as price
from evener.schedules import make
from evener.sim import plan_costs, simulate

SPEED = {"fast": 4.0, "slow": 1.0}
NAMES = "abcd"


def figure(value: float) -> Figure:
    return Figure(value=value, source="measured")


def profile(*, whole: bool = True, tied: bool = False) -> Profile:
    """Layers a..d of 1..4 ms forward a sample on the slow kind, twice that backward, 3 MB each."""
    layers = tuple(
        Layer(
            name=n,
            num_params=750_000,
            param_bytes=3_000_000,
            output_bytes_per_sample=1_000,
            saved_bytes_per_sample=5_000,
            tied=({"a": ("d",), "d": ("a",)}.get(n, ()) if tied else ()),
        )
        for n in NAMES
    )
    timings = tuple(
        Timing(
            layer=n,
            kind=kind,
            micro_batch=b,
            forward_s=figure(1e-3 * (i + 1) * b / speed),
            backward_s=figure(2e-3 * (i + 1) * b / speed),
            update_s=figure(1e-4),
        )
        for kind, speed in SPEED.items()
        for i, n in enumerate(NAMES)
        for b in (1, 8)
    )
    steps = tuple(
        StepTiming(
            kind=kind,
            micro_batch=b,
            forward_s=figure(1e-2 * b / speed),
            backward_s=figure(2e-2 * b / speed),
            update_s=figure(5e-4),
            step_overhead_s=figure(1e-3),
            input_s=figure(1e-4 * b),
        )
        for kind, speed in SPEED.items()
        for b in (1, 8)
    )
    return Profile(
        model="m", layers=layers, timings=timings, steps=steps if whole else (), gradient_bytes=12_000_000
    )


def fleet(**more) -> Fleet:
    devices = (
        Device(name="x/0", kind="fast", memory_bytes=figure(1e9), framework_bytes=figure(1e8)),
        Device(name="x/1", kind="slow", memory_bytes=figure(1e9), free_memory_bytes=figure(5e8)),
        Device(name="y/0", kind="slow"),
    )
    links = (Link(a="x", b="x", curve=line(1e-4, 1e10)), Link(a="x", b="y", curve=line(1e-3, 1e9), **more))
    return Fleet(devices=devices, links=links)


def one_pipeline(*stages) -> Plan:
    return Plan(global_batch=16, pipelines=(Pipeline(samples=16, micro_batch=4, stages=stages),))


CUT = one_pipeline(stage("ab", ("x/0", 4)), stage("cd", ("y/0", 4)))


def test_data_parallel_takes_what_the_planner_says():
    plan = Plan(
        global_batch=20,
        pipelines=(
            Pipeline(samples=13, micro_batch=4, stages=(stage("abcd", ("x/0", 4)),)),
            Pipeline(samples=4, micro_batch=4, stages=(stage("abcd", ("x/1", 4)),)),
            Pipeline(samples=3, micro_batch=3, stages=(stage("abcd", ("y/0", 3)),)),
        ),
    )
    model = CostModel(fleet=fleet(), profile=profile())
    costs = plan_costs(model, plan)
    assert costs.compute_s[0, "x/0", "F", 4] == pytest.approx(0.01)
    assert costs.input_s[2, "y/0", 3] == pytest.approx(3e-4)
    assert simulate(make(plan), plan, costs).step_s == pytest.approx(price(model, plan).step_s, rel=1e-9)
    assert costs.notes == ()


def test_a_pipeline_takes_what_the_cost_model_says_of_1f1b():
    for whole, tied in ((True, False), (False, False), (False, True)):
        model = CostModel(fleet=fleet(), profile=profile(whole=whole, tied=tied))
        costs = plan_costs(model, CUT)
        played = simulate(make(CUT, name="1f1b"), CUT, costs)
        assert played.step_s == pytest.approx(price(model, CUT).step_s, rel=1e-9)


def test_layers_with_other_holders_are_reduced_apart_later_ones_first():
    whole = Pipeline(samples=16, micro_batch=4, stages=(stage("abcd", ("x/1", 4)),))
    plan = Plan(global_batch=32, pipelines=(CUT.pipelines[0], whole))
    costs = plan_costs(CostModel(fleet=fleet(), profile=profile()), plan)
    assert [(r.layers, r.devices) for r in costs.reductions] == [
        (("c", "d"), ("y/0", "x/1")),
        (("a", "b"), ("x/0", "x/1")),
    ]
    (_, ready), *_ = costs.reductions[0].pieces
    assert ready == pytest.approx((1.0, 0.7)), "c, d are 7 of 10 parts of the backward that holds all"


def test_a_tied_layer_is_summed_by_the_holders_of_both():
    costs = plan_costs(CostModel(fleet=fleet(), profile=profile(tied=True)), CUT)
    assert [(r.layers, r.devices) for r in costs.reductions] == [(("a",), ("x/0", "y/0"))]


def test_recompute_adds_a_forward_and_keeps_only_the_stages_input():
    again = one_pipeline(stage("ab", ("x/0", 4)), stage("cd", ("y/0", 4)))
    pipeline = again.pipelines[0]
    stages = (
        pipeline.stages[0],
        type(pipeline.stages[1])(layers=("c", "d"), shares=pipeline.stages[1].shares, recompute=True),
    )
    again = one_pipeline(*stages)
    model = CostModel(fleet=fleet(), profile=profile())
    plain, costs = plan_costs(model, CUT), plan_costs(model, again)
    forward = plain.compute_s[1, "y/0", "F", 4]
    assert costs.compute_s[1, "y/0", "B", 4] == pytest.approx(plain.compute_s[1, "y/0", "B", 4] + forward)
    assert costs.memory["y/0"].saved_bytes[1] == 1_000
    assert plain.memory["y/0"].saved_bytes[1] == 10_000


def test_limits_are_what_is_free_less_the_margin_and_the_framework():
    memory = plan_costs(CostModel(fleet=fleet(), profile=profile()), CUT, memory_margin=0.2).memory
    assert memory["x/0"].limit_bytes == pytest.approx(0.8e9 - 1e8)
    assert memory["y/0"].limit_bytes is None


def test_the_parts_of_a_backward_are_assumed_and_said():
    costs = plan_costs(CostModel(fleet=fleet(), profile=profile()), CUT)
    i, w, b = (costs.compute_s[0, "x/0", kind, 4] for kind in "IWB")
    assert i == w == pytest.approx(b / 2)
    assert "assumed" in costs.split_note


def test_a_pair_without_a_link_costs_nothing_and_is_said():
    lone = Fleet(devices=fleet().devices)
    costs = plan_costs(CostModel(fleet=lone, profile=profile()), CUT)
    assert costs.wires["x/0", "y/0"].curve is None
    assert any("x/0 and y/0" in note for note in costs.notes)


def test_one_bus_is_shared_by_direction():
    wires = plan_costs(CostModel(fleet=fleet(bus="wire"), profile=profile()), CUT).wires
    assert wires["x/0", "y/0"].bus != wires["y/0", "x/0"].bus
    assert plan_costs(CostModel(fleet=fleet(), profile=profile()), CUT).wires["x/0", "y/0"].bus is None
