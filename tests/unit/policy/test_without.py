import pytest

from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.errors import NoPlanFitsError
from evener.policy.without import with_device, without


def stage(layers: str, *shares: tuple[str, int]) -> Stage:
    return Stage(layers=tuple(layers), shares=tuple(Share(devices=(d,), samples=n) for d, n in shares))


def one_pipeline(*stages: Stage) -> Plan:
    return Plan(global_batch=8, pipelines=(Pipeline(samples=8, micro_batch=2, stages=stages),))


def held(plan: Plan) -> list[tuple[str, tuple[str, ...]]]:
    return [
        ("".join(s.layers), tuple(d for x in s.shares for d in x.devices))
        for p in plan.pipelines
        for s in p.stages
    ]


def test_a_lost_stage_goes_to_the_neighbour_with_fewer_layers():
    plan = one_pipeline(stage("abc", ("x", 2)), stage("de", ("y", 2)), stage("f", ("z", 2)))
    merged, why = without(plan, ["y"])
    assert held(merged) == [("abc", ("x",)), ("def", ("z",))]
    assert "the layers of y go to its neighbours" in why


def test_several_stages_of_one_device_and_a_shared_one():
    plan = one_pipeline(stage("a", ("x", 2)), stage("b", ("y", 1), ("z", 1)), stage("c", ("x", 2)))
    merged, _ = without(plan, ["x"])
    assert held(merged) == [("abc", ("y", "z"))]


def test_two_devices_after_one_another_and_then_the_last():
    plan = one_pipeline(stage("a", ("x", 2)), stage("b", ("y", 2)), stage("c", ("z", 2)))
    merged, _ = without(plan, ["x", "z"])
    assert held(merged) == [("abc", ("y",))]
    with pytest.raises(NoPlanFitsError):
        without(merged, ["y"])


def test_replicas_take_over_the_samples():
    pipelines = tuple(
        Pipeline(samples=n, micro_batch=2, stages=(stage("abc", (d, 2)),))
        for d, n in (("x", 5), ("y", 4), ("z", 3))
    )
    smaller, _ = without(Plan(global_batch=12, pipelines=pipelines), ["z"])
    assert [(p.devices, p.samples) for p in smaller.pipelines] == [(("x",), 7), (("y",), 5)]


def test_a_new_device_takes_an_average_share():
    pipelines = tuple(
        Pipeline(samples=n, micro_batch=4, stages=(stage("abc", (d, 4)),)) for d, n in (("x", 7), ("y", 5))
    )
    larger, why = with_device(Plan(global_batch=12, pipelines=pipelines), "z")
    assert [(p.devices, p.samples) for p in larger.pipelines] == [(("x",), 5), (("y",), 3), (("z",), 4)]
    assert "z takes an average share, 4 samples" in why


def test_the_rest_of_a_pipeline_goes_on_with_more_layers_rather_than_idle():
    """Story: a living device was left without work, and the one that did all of it held the only state."""
    first = Pipeline(samples=4, micro_batch=2, stages=(stage("ab", ("x", 2)), stage("c", ("y", 2))))
    second = Pipeline(samples=8, micro_batch=2, stages=(stage("abc", ("z", 2)),))
    merged, why = without(Plan(global_batch=12, pipelines=(first, second)), ["y"])
    assert held(merged) == [("abc", ("x",)), ("abc", ("z",))]
    assert "the layers of y go to its neighbours" in why
