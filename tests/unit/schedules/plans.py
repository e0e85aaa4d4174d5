"""Small plans and costs for tests, by hand."""

from benchmarks.random_plans import stage
from evener.core.plan import Pipeline, Plan
from evener.core.routes import Routes
from evener.schedules.costs import Costs, Wire


def chain(devices: list[str], num_micro_batches: int) -> Plan:
    """One pipeline, one layer a stage, one sample a micro-batch."""
    stages = tuple(stage("abcdefghij"[i], (device, 1)) for i, device in enumerate(devices))
    pipeline = Pipeline(samples=num_micro_batches, micro_batch=1, stages=stages)
    return Plan(global_batch=num_micro_batches, pipelines=(pipeline,))


def data_parallel(*samples: int) -> Plan:
    """One stage of layers a, b per device; micro-batches of 2."""
    pipelines = tuple(
        Pipeline(samples=n, micro_batch=2, stages=(stage("ab", (f"h/{i}", 2)),))
        for i, n in enumerate(samples)
    )
    return Plan(global_batch=sum(samples), pipelines=pipelines)


def stage_costs(plan: Plan, seconds: dict[int, float], **more) -> Costs:
    """A third of each stage's seconds is forward, a third each part of backward; data moves at once."""
    routes = Routes(plan)
    compute = {
        (stage, device, kind, routes.samples(stage, device, m)): seconds[stage] * part / 3
        for device in routes.devices
        for stage, m in routes.work(device)
        for kind, part in (("F", 1), ("I", 1), ("W", 1), ("B", 2))
    }
    wires = {(a, b): Wire() for a in routes.devices for b in routes.devices if a != b}
    return Costs(**({"compute_s": compute, "wires": wires} | more))
