"""Who meets in which wave, and who holds a layer."""

from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.routes import Routes
from evener.session.layout.scopes import wave_holders, wave_members

A, B, C = "lab/a", "lab/b", "lab/c"


def stage(layers: str, *shares: tuple[str, int]) -> Stage:
    return Stage(layers=tuple(layers), shares=tuple(Share(devices=(d,), samples=n) for d, n in shares))


def test_who_has_samples_meets() -> None:
    """4 + 1 samples on a, whose second stage b shares, beside 3 of c: b has none of the single sample."""
    two = (stage("x", (A, 4)), stage("y", (A, 3), (B, 1)))
    pipelines = (
        Pipeline(samples=5, micro_batch=4, stages=two),
        Pipeline(samples=3, micro_batch=3, stages=(stage("xy", (C, 3)),)),
    )
    routes = Routes(Plan(global_batch=8, pipelines=pipelines))
    norms = {0: ("x",), 1: ("y.1", "y.2"), 2: ("x", "y.1", "y.2")}
    assert wave_members(routes, norms) == {
        ("x", 0): (A, C),
        ("x", 1): (A,),
        ("y.1", 0): (A, B, C),
        ("y.1", 1): (A,),
        ("y.2", 0): (A, B, C),
        ("y.2", 1): (A,),
    }
    assert wave_holders(routes, norms) == {"x": (A, C), "y.1": (A, B, C), "y.2": (A, B, C)}
    assert wave_members(routes, {}) == wave_holders(routes, {}) == {}
