"""What the parts of a cut model are worth, on worked numbers."""

import pytest

from evener.core.figures import Figure
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.profile import Layer, Profile, Timing
from evener.cost.evaluate import CostModel
from evener.cost.worth import unbounded_samples_per_s, useful_samples


def measured(value: float) -> Figure:
    return Figure(value=value, source="measured")


def timing(layer: str, kind: str, size: int, seconds: float) -> Timing:
    both = {"forward_s": measured(seconds / 3), "backward_s": measured(seconds * 2 / 3)}
    return Timing(layer=layer, kind=kind, micro_batch=size, update_s=measured(0.05), **both)


MODEL = CostModel(
    fleet=Fleet(devices=(Device(name="h/a", kind="fast"), Device(name="h/b", kind="slow"))),
    profile=Profile(
        model="m",
        layers=tuple(Layer(name=n, num_params=1, param_bytes=4, output_bytes_per_sample=4) for n in "xy"),
        timings=(
            *(timing("x", "fast", b, 0.15 * b) for b in (1, 2)),
            *(timing("y", "fast", b, 0.05 * b) for b in (1, 2)),
            timing("x", "slow", 2, 0.6),
            timing("y", "slow", 2, 0.2),
        ),
    ),
)


def stage(layers: str, **samples: int) -> Stage:
    shares = tuple(Share(devices=(f"h/{d}",), samples=n) for d, n in samples.items())
    return Stage(layers=tuple(layers), shares=shares)


def plan(*stages: Stage) -> Plan:
    return Plan(global_batch=16, pipelines=(Pipeline(samples=16, micro_batch=2, stages=stages),))


def test_parts_of_the_picture() -> None:
    worth = useful_samples(MODEL, plan(stage("x", a=2), stage("y", b=2)))
    assert worth == {"h/a": pytest.approx(12), "h/b": pytest.approx(4)}


def test_a_shared_stage_counts_by_samples() -> None:
    worth = useful_samples(MODEL, plan(stage("x", a=1, b=1), stage("y", b=2)))
    assert worth == {"h/a": pytest.approx(6), "h/b": pytest.approx(10)}


def test_alone_without_a_limit_on_memory() -> None:
    assert unbounded_samples_per_s(MODEL, "fast", 16) == pytest.approx(1 / (0.2 + 0.1 / 16))
    assert unbounded_samples_per_s(MODEL, "slow", 16) == pytest.approx(1 / (0.4 + 0.1 / 16))
