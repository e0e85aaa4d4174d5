"""What a plan becomes without one of its devices, or with less memory: the smallest change, no search."""

from msgspec.structs import replace

from evener.core.exchange import without as kept_groups
from evener.core.faults import Fault
from evener.core.ownership import holders_of
from evener.core.plan import LeftOut, Ownership, Pipeline, Plan, Stage
from evener.core.split import apportion
from evener.core.words import counted
from evener.errors import NoPlanFitsError


def shrink(plan: Plan, fault: Fault) -> tuple[Plan, str]:
    """The plan after `leave` or `oom`, and the sentence why.

    A stage that has other shares goes on with them. A pipeline in which the device stood alone in a stage
    ends, and the other pipelines take its samples in proportion to theirs. Out of memory halves the
    micro-batches of the device's pipelines. NoPlanFitsError when nothing is left or a micro-batch of one
    does not fit either; for `join`, which needs a search. Example: one-stage pipelines of 8, 4 and 4
    samples without the last become 11 and 5 (shares of 16 in the ratio 8 : 4).
    """
    if fault.type == "oom":
        return _halved(plan, fault.device)
    if fault.type == "leave":
        return _without(plan, fault.device)
    raise NoPlanFitsError(
        f"a plan with {fault.device} needs a search",
        remedy="a replan function that plans anew, as `evener simulate` has",
    )


def _without(plan: Plan, device: str) -> tuple[Plan, str]:
    kept, told = [], []
    for number, pipeline in enumerate(plan.pipelines):
        stages = [_stage_without(stage, device, pipeline.micro_batch) for stage in pipeline.stages]
        if all(stages):
            kept.append(replace(pipeline, stages=tuple(s for s in stages if s)))
        else:
            told.append(f"pipeline {number} ends, the others take its {counted(pipeline.samples, 'sample')}")
    if not kept:
        raise NoPlanFitsError(
            f"no pipeline is left without {device}",
            numbers=f"{counted(len(plan.pipelines), 'pipeline')}, each with a stage that only it holds",
            remedy="a plan with two pipelines or shared stages, or a new search over the remaining devices",
        )
    weights = [p.samples for p in kept] if any(p.samples for p in kept) else [1] * len(kept)
    samples = apportion(plan.global_batch, weights)
    pipelines = tuple(resized_to(p, n) for p, n in zip(kept, samples, strict=True))
    left_out = (*plan.left_out, LeftOut(device=device, reason="left"))
    gone = {d for d in plan.devices if d not in {x for p in pipelines for x in p.devices}} - {device}
    left_out += tuple(LeftOut(device=d, reason=f"its pipeline needed {device}") for d in sorted(gone))
    why = "; ".join(told) or f"the other shares of its stages take the samples of {device}"
    reductions = kept_groups(plan.reductions, device) if plan.is_data_parallel else ()
    why += "; sums go over its group without it" if any(r.part is not None for r in reductions) else ""
    left = _renewed(plan, pipelines, left_out)
    holders = holders_of(left)
    owners = tuple(o for o in (_owners_among(o, holders[o.layer]) for o in plan.owners) if o is not None)
    why += f"; the other owners share what {device} kept" if owners else ""
    return replace(left, reductions=reductions, owners=owners), why


def _owners_among(owner: Ownership, holders: tuple[str, ...]) -> Ownership | None:
    parts = {name: part for name, part in owner.parts.items() if name in holders}
    return replace(owner, parts=parts) if sum(parts.values()) else None


def _stage_without(stage: Stage, device: str, micro_batch: int) -> Stage | None:
    shares = [s for s in stage.shares if device not in s.devices]
    if len(shares) == len(stage.shares):
        return stage
    if not shares:
        return None
    parts = apportion(micro_batch, [s.samples for s in shares])
    return replace(
        stage, shares=tuple(replace(s, samples=n) for s, n in zip(shares, parts, strict=True) if n)
    )


def resized_to(pipeline: Pipeline, samples: int) -> Pipeline:
    """The pipeline with another number of samples, in smaller micro-batches where it has fewer than one."""
    if samples >= pipeline.micro_batch or not samples:
        return replace(pipeline, samples=samples)
    stages = tuple(_resized(stage, samples) for stage in pipeline.stages)
    return replace(pipeline, samples=samples, micro_batch=samples, stages=stages)


def _resized(stage: Stage, micro_batch: int) -> Stage:
    parts = apportion(micro_batch, [s.samples for s in stage.shares])
    shares = [replace(s, samples=n) for s, n in zip(stage.shares, parts, strict=True) if n]
    return replace(stage, shares=tuple(shares))


def _halved(plan: Plan, device: str) -> tuple[Plan, str]:
    pipelines, told = [], []
    for number, pipeline in enumerate(plan.pipelines):
        if device not in pipeline.devices:
            pipelines.append(pipeline)
            continue
        half = pipeline.micro_batch // 2
        if not half:
            raise NoPlanFitsError(
                f"{device} is out of memory and its micro-batches hold one sample",
                remedy="fewer layers on this device, recompute, or the device left out",
            )
        stages = tuple(_resized(stage, half) for stage in pipeline.stages)
        pipelines.append(replace(pipeline, micro_batch=half, stages=stages))
        told.append(f"micro-batches of pipeline {number} are halved to {half}")
    smaller = replace(_renewed(plan, tuple(pipelines), plan.left_out), owners=plan.owners)
    return smaller, "; ".join(told)


def _renewed(plan: Plan, pipelines: tuple[Pipeline, ...], left_out: tuple[LeftOut, ...]) -> Plan:
    """Everything that was decided for the old devices is dropped with them."""
    return replace(
        plan, pipelines=pipelines, left_out=left_out, prediction=None, reductions=(), owners=(), tables=()
    )
