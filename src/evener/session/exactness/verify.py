"""`verify`: the same steps on the fleet and in a plain loop on one device, and how far apart they end."""

from pathlib import Path
from typing import Literal

import msgspec
import torch
from safetensors.torch import load_file

from evener.core.exchange import loses
from evener.core.figures import Value
from evener.core.plan import Plan
from evener.core.words import counted
from evener.errors import NonFiniteError
from evener.report.metrics import read_metrics
from evener.runtime.compression.codec import codec_of
from evener.session.checkpoints.tensors import (
    PARAMETER_FILE,
    drop_first_gradients,
    first_gradients,
)
from evener.session.exactness.reference import (
    at_once,
    by_hosts,
    differing_buffers,
    distance,
    merged,
    micro_batches,
    part_of_way,
    reference,
)
from evener.session.launched import check_unlaunched
from evener.session.launching.launch import launch
from evener.session.layout.precision import lower_precision
from evener.session.planning.decide import fewer_of
from evener.session.planning.pace import without_rate
from evener.session.recipe import Recipe, load_recipe
from evener.session.request import Request

DTYPES: tuple[Literal["float32", "float64"], ...] = ("float32", "float64")
FLOAT32_BOUND, FLOAT64_BOUND, PARAMETER_BOUND = 1e-6, 1e-12, 1e-10
METRICS_FILE = "metrics.jsonl"
# A fleet rounds in other places than one device does, so its error is not bounded by exactly that one's.
PRECISION_SLACK = 2.0


class Exactness(Value, frozen=True, kw_only=True):
    """How far the fleet's steps are from one device's: ‖a - b‖ / ‖b‖ over all parameters together.

    `lower_precision` has the devices that the plan lets compute in less than float32, by precision;
    `gradient_bound` is what `gradient_error` may be then: 1e-6 without any, else twice what one device shows
    that computes everything in that precision. `compressed` names what gradients went as between hosts, in
    float32 only; the bound is then four times what it makes of the gradient itself. `fewer` is how hosts
    exchange less often than once a step: errors are then those from a plain loop that does the same, and
    `deviation` is how far it ends from one sum a step, as a part of the way that goes. `as_planned` says that
    no error is beyond its bound. `nothing` says why nothing was compared where one device took every batch at
    once, as the plain loop does; that is not exact, and not the contrary. `buffers` are those, BatchNorm's
    aside, that do not end as the plain loop's, in float64.
    """

    exact: bool
    gradient_error: float
    gradient_error_float64: float
    parameter_error_float64: float
    steps: int
    plan: Plan
    as_planned: bool
    gradient_bound: float = FLOAT32_BOUND
    lower_precision: dict[str, tuple[str, ...]] = {}
    compressed: tuple[str, ...] = ()
    fewer: str = ""
    deviation: float | None = None
    notes: tuple[str, ...] = ()
    nothing: str = ""
    buffers: tuple[str, ...] = ()


def verify(request: Request) -> Exactness:
    """Run `request.steps` steps on the fleet, in float32 and float64, and compare with one device.

    Dropout that draws from a generator is switched off on both sides, and the notes say so; dropout free of
    the split stays on. One device runs the whole batch at once; with BatchNorm the plan's micro-batches one
    by one, or, where it is pooled, those with the same number merged, and the running statistics count as
    parameters. Exact means: gradient within 1e-6 in float32 and 1e-12 in float64, parameters within 1e-10 in
    float64, and the same buffers. A plan with devices in a
    lower precision is not exact; float64 is left alone by it and shows that the sums are right all the same.
    A fleet of one device takes its batches in two unequal parts: at once it would be compared with itself.
    UsageError under torchrun.
    """
    check_unlaunched("evener verify")
    request = in_two_parts(request)
    steps = request.steps or 5
    errors: dict[str, tuple[float, float]] = {}
    bound, lower = FLOAT32_BOUND, dict[str, tuple[str, ...]]()
    plan = request.plan
    notes, compressed, buffers = tuple[str, ...](), tuple[str, ...](), tuple[str, ...]()
    deviation: float | None = None
    for dtype in DTYPES:
        folder = Path(request.run_dir) / dtype
        folder.mkdir(parents=True, exist_ok=True)
        drop_first_gradients(folder)  # none is written before all devices meet in the first step
        asked = _asked(request, plan, dtype, steps, folder)
        outcome = launch(asked)
        plan = plan if dtype == "float64" else outcome.plan
        _check_moved(folder, steps)
        assert plan is not None
        loop, ends, notes = reference(asked, plan, steps)
        tensors = load_file(folder / PARAMETER_FILE)
        if plan.fewer:
            deviation = part_of_way(tensors, ends, asked)
            if plan.fewer.how == "accumulate":
                loop, ends, notes = reference(*at_once(asked, plan, steps))
        if dtype == "float32":
            lower = lower_precision(plan, load_recipe(request.script, request.seed))
            bound = max([bound, *(_rounding(asked, plan, p, loop.first_gradient) for p in lower)])
            compressed = tuple(
                dict.fromkeys(r.compression or "" for r in plan.reductions if loses(r.compression))
            )
            bound = max([bound, *(_packing(name, loop.first_gradient) for name in compressed)])
        if plan.fewer and plan.fewer.parts_hosts:
            gradient, ends = by_hosts(asked, plan, steps, folder)
            if next(loop.model.buffers(), None) is not None:
                notes += (f"{plan.fewer}: each host has buffers of its own, which were not compared",)
        else:
            held = first_gradients(folder)
            buffers = differing_buffers(tensors, loop.model, PARAMETER_BOUND)  # float64's stay
            whole = merged(held)  # each device's own gradients in turn: copies must agree as well
            gradient = max(distance(whole | own, loop.first_gradient) for own in held)
        own = {n: t.detach().cpu() for n, t in ends.items()}
        errors[dtype] = gradient, distance({n: tensors[n] for n in own}, own)
    assert plan is not None
    nothing, note = _alone(plan)
    notes += (*note, *untested(request, load_recipe(request.script, request.seed), plan))
    as_planned = (
        errors["float32"][0] <= bound
        and errors["float64"][0] <= FLOAT64_BOUND
        and errors["float64"][1] <= PARAMETER_BOUND
    )
    return Exactness(
        exact=as_planned and errors["float32"][0] <= FLOAT32_BOUND and not (plan.fewer or nothing or buffers),
        gradient_error=errors["float32"][0],
        gradient_error_float64=errors["float64"][0],
        parameter_error_float64=errors["float64"][1],
        steps=steps,
        plan=plan,
        as_planned=as_planned,
        gradient_bound=bound,
        lower_precision=lower,
        compressed=compressed,
        fewer=str(plan.fewer or ""),
        deviation=deviation,
        notes=notes,
        nothing=nothing,
        buffers=buffers,
    )


def in_two_parts(request: Request) -> Request:
    """The request of one device with a micro-batch of two thirds of the batch, unless it says how to split.

    Examples: a batch of 32 is taken as 22 and 10, one of 2 as 1 and 1. A mean that is none, or a model that
    mixes samples, shows.
    """
    if len(request.fleet.devices) > 1 or request.plan or request.micro_batch:
        return request
    batch = request.global_batch or load_recipe(request.script, request.seed).global_batch
    return msgspec.structs.replace(request, micro_batch=min(-(-2 * batch // 3), max(batch - 1, 1)))


def _alone(plan: Plan) -> tuple[str, tuple[str, ...]]:
    """(why nothing was compared, or ""; a note) where one device takes all."""
    if len(plan.devices) > 1:
        return "", ()
    (here,), sizes = plan.devices, [len(m) for row in micro_batches(plan) for m in row]
    if len(sizes) == 1:
        return f"{here} took every batch at once, as the plain loop does", ()
    told = " and ".join(map(str, sizes)) if len(sizes) == 2 else f"at most {max(sizes)}"
    return "", (f"{here} alone, its batches in parts of {told} samples: no sum over devices was tested",)


def _asked(
    request: Request, plan: Plan | None, dtype: Literal["float32", "float64"], steps: int, folder: Path
) -> Request:
    """The run in `dtype` that is compared: what it computes counts, not how fast."""
    return msgspec.structs.replace(
        request,
        steps=steps,
        dtype=dtype,
        plan=_uncompressed(plan) if dtype == "float64" and plan else plan,
        run_dir=str(folder),
        keep_gradient=True,
        dropout=False,
        evaluate=False,
        profile_s=6.0,
        # Once there is a plan, speed is not the question; where things lie still is.
        rehearse=request.rehearse and (plan is None or _has_accelerators(request)),
    )


def untested(request: Request, recipe: Recipe, plan: Plan) -> tuple[str, ...]:
    """Sentences on what was allowed or offered, has no part in the plan and so was not compared.

    Example: --fewer local:4 where one host alone is fastest: neither the way nor the other host is tested.
    """
    idle = [d.name for d in request.fleet.devices if d.name not in plan.devices]
    packed = any(loses(r.compression) for r in plan.reductions)
    found = [f"{', '.join(idle)} took no part in these steps: not tested"] if idle else []
    if request.rehearse and (lacking := without_rate(request.fleet, recipe)):
        found.append(f"{lacking}: no training of this model can be rehearsed on this fleet")
    for option, words, used in (
        ("--fewer", tuple(map(str, fewer_of(request, recipe))), bool(plan.fewer)),
        ("--compress", request.compress or tuple(recipe.compress), packed),
    ):
        if words and not used:
            _, told, why = plan.why.partition(f"{option} {','.join(words)} is not used: ")
            found.append(f"{option} {','.join(words)} was not used, so it was not tested{told and ': '}{why}")
    return tuple(found)


def _has_accelerators(request: Request) -> bool:
    return any(d.type != "cpu" for d in request.fleet.devices)


def _check_moved(folder: Path, steps: int) -> None:
    """A skipped step has no gradient to compare, and those after it are of other samples."""
    skipped = [r for r in read_metrics(folder / METRICS_FILE).records[-steps:] if r.skipped]
    if skipped:
        raise NonFiniteError(
            f"step {skipped[0].step} was skipped, so that there is nothing to compare: {skipped[0].skipped}",
            numbers=f"{len(skipped)} of {counted(steps, 'step')} skipped",
            remedy="a loss of the order of 1, or bfloat16, which needs no loss scale",
        )


def _rounding(request: Request, plan: Plan, precision: str, exact: dict[str, torch.Tensor]) -> float:
    """What the first gradient may be off: `PRECISION_SLACK` × the error of one device in `precision`."""
    rounded, _, _ = reference(request, plan, 1, autocast=getattr(torch, precision))
    return PRECISION_SLACK * distance(rounded.first_gradient, exact)


def _packing(name: str, exact: dict[str, torch.Tensor]) -> float:
    """What compression may change in the first gradient: it is used twice, on addends and on their sum."""
    whole = torch.cat([g.detach().float().cpu().flatten() for g in exact.values()])
    codec = codec_of(name, 0)
    data, said = torch.empty(codec.num_bytes(len(whole)), dtype=torch.uint8), torch.empty_like(whole)
    codec.encode(whole, data)
    codec.decode(data, said)
    return 2 * PRECISION_SLACK * float((said - whole).norm() / whole.norm())


def _uncompressed(plan: Plan) -> Plan:
    """The same plan with all bits on the wire: what float64 shows is then whether the sums are right."""
    whole = tuple(
        msgspec.structs.replace(r, compression=None) if loses(r.compression) else r for r in plan.reductions
    )
    return msgspec.structs.replace(plan, reductions=whole)
