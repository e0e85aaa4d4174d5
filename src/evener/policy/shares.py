"""The best numbers of samples for devices that keep what they hold: what can move at once."""

from msgspec.structs import replace

from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.core.order import with_micro_batch
from evener.core.plan import Pipeline, Plan, Prediction
from evener.core.profile import Profile
from evener.core.split import apportion
from evener.cost.evaluate import CostModel, evaluate, pipeline_cost
from evener.cost.memory import usable_bytes
from evener.planner.balance import balance
from evener.planner.groups import groups_of
from evener.planner.predict import pool_of, predict
from evener.planner.subsets import Split
from evener.policy.quanta import finer

SPREAD_OF_A_CHANGED_PLAN = 0.05
"""Bounds of its prediction: measured factors scatter by about that much (assumed)."""


def reshared(plan: Plan, fleet: Fleet, profile: Profile, job: Job) -> tuple[Plan, float]:
    """(the plan with the best shares for `profile`, seconds a step that the old shares would take).

    Devices, layers and cuts stay; every device keeps at least one sample, so that its speed stays known. Data
    parallelism: exact, as the planner shares. Other shapes: the shares of each stage by the seconds of a
    sample, then whole micro-batches to the pipelines so that the last ends as early as it can, where no
    device then holds more than fits. The old plan comes back where nothing is better. Example: 4 and 12
    ms a sample share 16 as 12 and 4; at 12 and 12 ms as 8 and 8, 96 ms, where 12 and 4 would take 144.
    """
    return _flat(plan, fleet, profile, job) if plan.is_data_parallel else _cut(plan, fleet, profile, job)


def _flat(plan: Plan, fleet: Fleet, profile: Profile, job: Job) -> tuple[Plan, float]:
    only = fleet.only(plan.devices)
    groups = groups_of(only, profile, job)
    pool = pool_of(only, profile, job, groups, micro_batch=job.micro_batch)
    held = plan.samples_by_device()
    before = pool.fixed({name: n for name, n in held.items() if n})
    best = pool.split(tuple(len(g.names) for g in pool.groups), least=1)
    if before is None or best is None or len(best.samples) < len(held):
        return plan, float("inf") if before is None else before.step_s
    if best.step_s >= before.step_s:
        best = before
    if plan.steal and job.micro_batch is None:
        best = finer(pool, best)
    pipelines = tuple(_with(p, best) for p in plan.pipelines)
    prediction = predict(pool, groups, profile, job, best)
    return replace(plan, pipelines=pipelines, prediction=prediction), before.step_s


def for_stealing(plan: Plan, fleet: Fleet, profile: Profile, job: Job) -> Plan:
    """A data-parallel plan whose devices may take each other's micro-batches, in small ones unless the job
    says how many.
    """
    only = fleet.only(plan.devices)
    groups = groups_of(only, profile, job)
    pool = pool_of(only, profile, job, groups, micro_batch=job.micro_batch)
    split = pool.fixed({name: n for name, n in plan.samples_by_device().items() if n})
    if split is None or job.micro_batch is not None:
        return replace(plan, steal=True)
    split = finer(pool, split)
    pipelines = tuple(_with(p, split) for p in plan.pipelines)
    prediction = predict(pool, groups, profile, job, split)
    return replace(plan, pipelines=pipelines, prediction=prediction, steal=True)


def _with(pipeline: Pipeline, split: Split) -> Pipeline:
    (name,) = pipeline.devices
    samples, size = split.samples.get(name, 0), split.micro_batches.get(name, 1)
    return replace(with_micro_batch(pipeline, size), samples=samples)


def _cut(plan: Plan, fleet: Fleet, profile: Profile, job: Job) -> tuple[Plan, float]:
    model = CostModel(fleet=fleet, profile=profile)
    before = evaluate(model, plan)
    best, cost = plan, before
    rooms = {
        name: max(usable_bytes(fleet.device(name), job.memory_margin), held)
        for name, held in before.memory_bytes.items()
    }
    pipelines = tuple(_stages_shared(model, p) for p in plan.pipelines)
    for shares in (plan.pipelines, pipelines):
        candidate = replace(plan, pipelines=_moved(model, shares, plan.global_batch))
        found = evaluate(model, candidate)
        fits = all(held <= rooms[name] for name, held in found.memory_bytes.items())
        if fits and found.step_s < cost.step_s:
            best, cost = candidate, found
    old = plan.prediction
    prediction = Prediction(
        step_s=cost.step_s,
        lower_s=cost.step_s * (1 - SPREAD_OF_A_CHANGED_PLAN),
        upper_s=cost.step_s * (1 + SPREAD_OF_A_CHANGED_PLAN),
        memory_bytes={name: round(n) for name, n in cost.memory_bytes.items()},
        solo_samples_per_s=old.solo_samples_per_s if old else {},
        solo_seconds=old.solo_seconds if old else {},
        unbounded_samples_per_s=old.unbounded_samples_per_s if old else {},
        useful_samples=old.useful_samples if old else {},
        seconds=cost.seconds,
    )
    return replace(best, prediction=prediction), before.step_s


def _stages_shared(model: CostModel, pipeline: Pipeline) -> Pipeline:
    """The shares of each stage in the ratio of what their devices do: one sample at least for each."""
    stages = []
    for stage in pipeline.stages:
        spare = pipeline.micro_batch - len(stage.shares)
        if len(stage.shares) > 1 and spare >= 0:
            more = apportion(spare, [_rate(model, share.devices) for share in stage.shares])
            pairs = zip(stage.shares, more, strict=True)
            stage = replace(stage, shares=tuple(replace(share, samples=1 + n) for share, n in pairs))
        stages.append(stage)
    return replace(pipeline, stages=tuple(stages))


def _rate(model: CostModel, devices: tuple[str, ...]) -> float:
    """Samples a second of a share's devices, all layers together: enough to compare the shares of a stage."""
    forward, backward = model.layers(model.fleet.device(devices[0]).kind, len(devices)).seconds(1)
    return 1.0 / max(float(forward.sum() + backward.sum()), 1e-12)


def _moved(model: CostModel, pipelines: tuple[Pipeline, ...], total: int) -> tuple[Pipeline, ...]:
    """`total` samples in whole micro-batches over the pipelines; the rest goes to the one that ends first."""
    if len(pipelines) == 1:
        return pipelines
    unit = max(p.micro_batch for p in pipelines)

    def end_s(pipeline: Pipeline, samples: int) -> float:
        return pipeline_cost(model, replace(pipeline, samples=samples)).end_s if samples else 0.0

    curves = [[end_s(p, n * unit) for n in range(total // unit + 1)] for p in pipelines]
    counts = [1] * len(pipelines)
    least = 1 if total // unit >= len(pipelines) else 0
    found = balance(total // unit, curves, counts, least=least)
    if found is None:
        return pipelines
    samples = [row[0] * unit for row in found[1]]
    rest = total - sum(samples)
    first = min(range(len(samples)), key=lambda i: end_s(pipelines[i], samples[i] + rest))
    samples[first] += rest
    return tuple(replace(p, samples=n) for p, n in zip(pipelines, samples, strict=True))
