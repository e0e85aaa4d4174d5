"""Plans written by hand, for tests that run them."""

from evener.core.plan import Pipeline, Plan, Share, Stage


def stage(layers: str, *shares: tuple[str, int], recompute: bool = False) -> Stage:
    """Example: stage("embed mix", ("lab/a", 3), ("lab/b", 1)) is two layers, shared 3 to 1."""
    return Stage(
        layers=tuple(layers.split()),
        shares=tuple(Share(devices=(d,), samples=n) for d, n in shares),
        recompute=recompute,
    )


def plan_of(*pipelines: tuple[int, tuple[Stage, ...]], schedule: str = "gpipe") -> Plan:
    """Of pipelines by their samples and stages; a micro-batch has the samples of the first stage's shares."""
    made = tuple(
        Pipeline(samples=n, micro_batch=sum(s.samples for s in stages[0].shares), stages=stages)
        for n, stages in pipelines
    )
    return Plan(global_batch=sum(p.samples for p in made), pipelines=made, schedule=schedule)
