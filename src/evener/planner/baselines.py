"""What people do without a planner: one device, even data parallelism, an even pipeline."""

from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.profile import Profile
from evener.core.split import apportion, spans_of
from evener.cost.evaluate import CostModel, evaluate
from evener.planner.assemble import plan_of
from evener.planner.blocks import Tables
from evener.planner.groups import groups_of
from evener.planner.options import Option
from evener.planner.result import Alternative


def baselines(tables: Tables, job: Job) -> list[tuple[str, Plan | None]]:
    """(name, plan) of each; None where it does not fit. The best micro-batch of a few is taken for each."""
    measured = {int(b) for g in tables.groups for b in tables.model.layers(g.kind).sizes}
    sizes = [job.micro_batch] if job.micro_batch else sorted({1, *measured})
    devices = [(g, n) for g, group in enumerate(tables.groups) for n in group.names]
    kinds = {(group.kind, group.usable_bytes, group.banned): g for g, group in enumerate(tables.groups)}
    singles = [_one(tables, job, g, b) for g in kinds.values() for b in sizes]
    found: list[tuple[str, Plan | None]] = [
        ("best single device", _best(tables, job, singles)),
        ("even data parallel", _best(tables, job, [_even_data(tables, job, b) for b in sizes])),
    ]
    if 1 < len(devices) <= tables.num_layers:
        found.append(("even pipeline", _best(tables, job, [_even_pipeline(tables, job, b) for b in sizes])))
    return found


def usual_ways(fleet: Fleet, profile: Profile, job: Job) -> list[Alternative]:
    """`baselines` of a fleet as alternatives."""
    tables = Tables(model=CostModel(fleet=fleet, profile=profile), groups=groups_of(fleet, profile, job))
    return alternatives_of(tables, baselines(tables, job))


def alternatives_of(tables: Tables, others: list[tuple[str, Plan | None]]) -> list[Alternative]:
    """`baselines` with their predicted seconds; one that does not fit says so."""
    return [
        Alternative(
            name=name,
            step_s=evaluate(tables.model, p).step_s if p else None,
            samples=p.samples_by_device() if p else {},
            note="" if p else "does not fit",
        )
        for name, p in others
    ]


def _best(tables: Tables, job: Job, plans: list[Plan | None]) -> Plan | None:
    fitting = [p for p in plans if p is not None]
    return min(fitting, key=lambda p: evaluate(tables.model, p).step_s, default=None)


def _one(tables: Tables, job: Job, group: int, size: int) -> Plan | None:
    size = min(size, job.global_batch)
    if not _fits(tables, group, 0, tables.num_layers, size, 1):
        return None
    option = Option(blocks=((group,),), cuts=(0, tables.num_layers), micro_batch=size, fill_s=0, period_s=0)
    return plan_of(tables, job.global_batch, ((option, job.global_batch),))


def _even_data(tables: Tables, job: Job, size: int) -> Plan | None:
    groups = [g for g, group in enumerate(tables.groups) for _ in group.names]
    parts = []
    for g, n in zip(groups, apportion(job.global_batch, [1] * len(groups)), strict=True):
        if n:
            micro = min(size, n)
            if not _fits(tables, g, 0, tables.num_layers, micro, 1):
                return None
            option = Option(
                blocks=((g,),), cuts=(0, tables.num_layers), micro_batch=micro, fill_s=0, period_s=0
            )
            parts.append((option, n))
    return plan_of(tables, job.global_batch, parts)


def _even_pipeline(tables: Tables, job: Job, size: int) -> Plan | None:
    size = min(size, job.global_batch)
    layers = [x.name for x in tables.model.profile.layers]
    spans = spans_of(apportion(len(layers), [1] * len(tables.model.fleet.devices)))
    group_of = {n: g for g, group in enumerate(tables.groups) for n in group.names}
    stages = []
    for s, (device, (first, last)) in enumerate(zip(tables.model.fleet.devices, spans, strict=True)):
        if not _fits(tables, group_of[device.name], first, last, size, len(spans) - s):
            return None
        share = Share(devices=(device.name,), samples=size)
        stages.append(Stage(layers=tuple(layers[first:last]), shares=(share,)))
    pipeline = Pipeline(samples=job.global_batch, micro_batch=size, stages=tuple(stages))
    return Plan(global_batch=job.global_batch, pipelines=(pipeline,), schedule="1f1b")


def _fits(tables: Tables, group: int, first: int, last: int, size: int, in_flight: int) -> bool:
    if size > tables.model.layers(tables.groups[group].kind).largest:
        return False
    table = tables.stage((group,), size, in_flight)
    plain = not table.recompute[first, last] and not table.residence[first, last]
    return bool(table.work_s[first, last] < float("inf")) and plain
