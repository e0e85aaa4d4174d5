"""A plan without a device, or with one more, changed as little as possible: where nothing was measured."""

from collections.abc import Sequence

from msgspec.structs import replace

from evener.core.faults import Fault
from evener.core.plan import LeftOut, Pipeline, Plan, Share, Stage
from evener.core.split import apportion
from evener.core.words import counted
from evener.errors import NoPlanFitsError
from evener.sim.shrink import resized_to, shrink


def without(plan: Plan, lost: Sequence[str]) -> tuple[Plan, str]:
    """The plan without the devices `lost`, and the sentence why it is this one.

    Shares and pipelines that remain take over the samples. Where that would leave a living device without
    work, the layers of a lost one go to the neighbour in its pipeline that holds fewer. NoPlanFitsError
    when no device is left. Example: one-stage pipelines of 8, 4 and 4 samples become 11 and 5 without
    the last.
    """
    told = []
    for device in lost:
        if device not in plan.devices:
            continue
        try:
            smaller, sentence = shrink(plan, Fault(type="leave", device=device, at_step=0))
        except NoPlanFitsError:
            smaller = plan
        if len(smaller.devices) < len(plan.devices) - 1 or smaller is plan:
            smaller, sentence = _merged(plan, device)
        plan = smaller
        told.append(sentence)
    return plan, "; ".join(told)


def with_device(plan: Plan, device: str) -> tuple[Plan, str]:
    """The plan with `device` as one more pipeline that holds the whole model, and the sentence why.

    It takes an average share: samples over devices. Example: 7 and 5 of 12 samples become 5, 3 and 4.
    """
    share = max(1, round(plan.global_batch / (len(plan.devices) + 1)))
    parts = apportion(plan.global_batch - share, [p.samples for p in plan.pipelines])
    old = tuple(resized_to(p, n) for p, n in zip(plan.pipelines, parts, strict=True))
    layers = tuple(layer for stage in plan.pipelines[0].stages for layer in stage.layers)
    size = min(share, max(p.micro_batch for p in plan.pipelines))
    stage = Stage(layers=layers, shares=(Share(devices=(device,), samples=size),))
    new = Pipeline(samples=share, micro_batch=size, stages=(stage,))
    left_out = tuple(x for x in plan.left_out if x.device != device)
    grown = replace(plan, pipelines=(*old, new), left_out=left_out, prediction=None, reductions=(), owners=())
    told = counted(share, "sample")
    why = f"{device} takes an average share, {told}; whether the model fits was not measured"
    return grown, f"{why}; all devices sum in one ring" if plan.reductions else why


def _merged(plan: Plan, device: str) -> tuple[Plan, str]:
    pipelines = tuple(p for p in (_without_stages(p, device) for p in plan.pipelines) if p)
    if not pipelines:
        raise NoPlanFitsError(f"no device is left without {device}", remedy="start again: --resume")
    left_out = (*plan.left_out, LeftOut(device=device, reason="left"))
    merged = replace(
        plan,
        pipelines=pipelines,
        left_out=left_out,
        schedule="1f1b" if plan.schedule == "unequal" else plan.schedule,
        prediction=None,
        reductions=(),
        owners=(),
        tables=(),
    )
    return merged, f"the layers of {device} go to its neighbours; whether they fit was not measured"


def _without_stages(pipeline: Pipeline, device: str) -> Pipeline | None:
    """The pipeline with each stage that only `device` holds merged into a neighbour; None if none is left."""
    stages = list(pipeline.stages)
    while True:
        alone = [i for i, s in enumerate(stages) if {d for x in s.shares for d in x.devices} == {device}]
        if not alone:
            return replace(pipeline, stages=tuple(stages))
        if len(alone) == len(stages):
            return None
        at = next(
            i for i in alone if (i - 1 not in alone and i > 0) or (i + 1 not in alone and i + 1 < len(stages))
        )
        near = [i for i in (at - 1, at + 1) if 0 <= i < len(stages) and i not in alone]
        to = min(near, key=lambda i: len(stages[i].layers))
        low, high = min(at, to), max(at, to)
        layers = stages[low].layers + stages[high].layers
        stages[to] = replace(stages[to], layers=layers)
        del stages[at]
