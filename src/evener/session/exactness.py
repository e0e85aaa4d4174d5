"""`verify`: the same steps on the fleet and in a plain loop on one device, and how far apart they end."""

import dataclasses
from collections.abc import Callable
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors.torch import load_file
from torch.nn.modules.batchnorm import _BatchNorm

from evener.core.exchange import exchange_of
from evener.core.figures import Value
from evener.core.order import epoch_order, global_batch_at, resized
from evener.core.plan import Plan
from evener.errors import NonFiniteError
from evener.report.metrics import read_metrics
from evener.runtime.compression.codec import codec_of
from evener.runtime.dropout import dropout_keys, keyed_layers
from evener.session.decide import DROPOUT, fewer_of, inexact_parts, samples_to_train
from evener.session.fewer_reference import PlainHost, run_hosts
from evener.session.keep import (
    GRADIENT_FILE,
    PARAMETER_FILE,
    drop_first_gradients,
    first_gradients,
    load_weights,
)
from evener.session.precision import lower_precision, precision_parts
from evener.session.recipe import Recipe, in_dtype, load_recipe, with_keys, without_dropout
from evener.session.reference import PlainLoop
from evener.session.request import Request
from evener.session.run import run

DTYPES: tuple[Literal["float32", "float64"], ...] = ("float32", "float64")
FLOAT32_BOUND, FLOAT64_BOUND, PARAMETER_BOUND = 1e-6, 1e-12, 1e-10
DROPOUT_OFF = "dropout was switched off on both sides for this comparison"
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
    no error is beyond its bound.
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


def verify(request: Request) -> Exactness | None:
    """Run `request.steps` steps on the fleet, in float32 and float64, and compare with one device.

    Dropout that draws from a generator is switched off on both sides, and the notes say so; dropout free of
    the split stays on. One device runs the whole batch at once; with BatchNorm the plan's micro-batches one
    by one, or, where it is pooled, those with the same number merged, and the running statistics count as
    parameters. Exact means: gradient within 1e-6 in float32 and 1e-12 in float64, parameters within 1e-10 in
    float64. A plan with devices in a
    lower precision is not exact; float64 is left alone by it and shows that the sums are right all the same.
    """
    steps = request.steps or 5
    errors: dict[str, tuple[float, float]] = {}
    bound, lower = FLOAT32_BOUND, dict[str, tuple[str, ...]]()
    plan = request.plan
    notes: tuple[str, ...] = ()
    compressed: tuple[str, ...] = ()
    deviation: float | None = None
    for dtype in DTYPES:
        folder = Path(request.run_dir) / dtype
        folder.mkdir(parents=True, exist_ok=True)
        drop_first_gradients(folder)  # none is written before all devices meet in the first step
        asked = _asked(request, plan, dtype, steps, folder)
        outcome = run(asked)
        if outcome is None:
            return None
        plan = plan if dtype == "float64" else outcome.plan
        _check_moved(folder, steps)
        assert plan is not None
        loop, ends, notes = _reference(asked, plan, steps)
        tensors = load_file(folder / PARAMETER_FILE)
        if plan.fewer:
            deviation = _part_of_way(tensors, ends, asked)
            if plan.fewer.how == "accumulate":
                loop, ends, notes = _reference(*_at_once(asked, plan, steps))
        if dtype == "float32":
            lower = lower_precision(plan, load_recipe(request.script, request.seed))
            bound = max([bound, *(_rounding(asked, plan, p, loop.first_gradient) for p in lower)])
            compressed = tuple(dict.fromkeys(r.compression for r in plan.reductions if r.compression))
            bound = max([bound, *(_packing(name, loop.first_gradient) for name in compressed)])
        if plan.fewer and plan.fewer.parts_hosts:
            gradient, ends = _by_hosts(asked, plan, steps, folder)
        else:
            held = first_gradients(folder)
            whole = _merged(held)  # each device's own gradients in turn: copies must agree as well
            gradient = max(_distance(whole | own, loop.first_gradient) for own in held)
        own = {n: t.detach().cpu() for n, t in ends.items()}
        errors[dtype] = gradient, _distance({n: tensors[n] for n in own}, own)
    assert plan is not None
    notes += untested(request, load_recipe(request.script, request.seed), plan)
    as_planned = (
        errors["float32"][0] <= bound
        and errors["float64"][0] <= FLOAT64_BOUND
        and errors["float64"][1] <= PARAMETER_BOUND
    )
    return Exactness(
        exact=as_planned and errors["float32"][0] <= FLOAT32_BOUND and not plan.fewer,
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
    )


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
    packed = any(r.compression for r in plan.reductions)
    found = [f"{', '.join(idle)} took no part in these steps: not tested"] if idle else []
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
            numbers=f"{len(skipped)} of {steps} steps skipped",
            remedy="a loss of the order of 1, or bfloat16, which needs no loss scale",
        )


def _rounding(request: Request, plan: Plan, precision: str, exact: dict[str, torch.Tensor]) -> float:
    """What the first gradient may be off: `PRECISION_SLACK` × the error of one device in `precision`."""
    rounded, _, _ = _reference(request, plan, 1, autocast=getattr(torch, precision))
    return PRECISION_SLACK * _distance(rounded.first_gradient, exact)


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
    whole = tuple(msgspec.structs.replace(r, compression=None) for r in plan.reductions)
    return msgspec.structs.replace(plan, reductions=whole)


@dataclasses.dataclass(frozen=True)
class _Plain:
    """The recipe as one process of a plain loop has it."""

    recipe: Recipe
    optimizer: torch.optim.Optimizer
    loss_and_weight: Callable[[Any, int], tuple[torch.Tensor, float]]
    notes: tuple[str, ...]


def _plain(request: Request, plan: Plan, autocast: torch.dtype | None = None) -> _Plain:
    recipe = with_keys(load_recipe(request.script, request.seed), request.seed)
    if request.weights:
        load_weights(recipe.model, request.weights)
    notes = inexact_parts(recipe) + precision_parts(plan, recipe)
    if DROPOUT in notes:
        notes += (DROPOUT_OFF,)
    recipe = in_dtype(without_dropout(recipe), getattr(torch, request.dtype or "float32"))
    if request.global_batch:
        recipe = dataclasses.replace(recipe, global_batch=request.global_batch)
    model = recipe.model.train()
    optimizer = recipe.optimizer([p for p in model.parameters() if p.requires_grad])
    mean = recipe.problem.reduction == "mean"

    def loss_and_weight(batch: Any, size: int) -> tuple[torch.Tensor, float]:
        args, kwargs, target = recipe.problem.inputs(batch)
        weight = float(size if recipe.weight is None else recipe.weight(batch))
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            result = recipe.loss(model(*args, **kwargs), target)
        loss = result[0] if isinstance(result, tuple) else result
        return (loss * weight if mean else loss), weight

    return _Plain(recipe, optimizer, loss_and_weight, notes)


def _reference(
    request: Request, plan: Plan, steps: int, autocast: torch.dtype | None = None
) -> tuple[PlainLoop, dict[str, torch.Tensor], tuple[str, ...]]:
    """The plain loop after its steps, what it ended with by name, and sentences on what was compared."""
    plain = _plain(request, plan, autocast)
    recipe, model, notes = plain.recipe, plain.recipe.model, plain.notes
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    pools = bool(norms) and recipe.batch_norm == "wave"

    def parts_of(samples: int) -> list[list[int]]:
        if not norms:
            return [list(range(samples))]
        own = micro_batches(resized(plan, samples))
        return merged_waves(own) if pools else [positions for pipeline in own for positions in pipeline]

    keyed = keyed_layers(model)
    loop = PlainLoop(
        model,
        plain.optimizer,
        plain.loss_and_weight,
        recipe.max_norm,
        lambda step, positions: dropout_keys(keyed, step, positions),
    )
    loop.run(
        lambda chosen: recipe.collate_fn([recipe.dataset[i] for i in chosen]),
        len(recipe.dataset),
        recipe.global_batch,
        steps,
        seed=request.seed,
        shuffle=recipe.shuffle,
        parts_of=parts_of,
        rate_at=recipe.schedule,
    )
    ends: dict[str, torch.Tensor] = dict(model.named_parameters())
    if pools:
        ends |= {n: b for n, b in model.named_buffers() if "running_" in n}
    return loop, ends, notes


def _at_once(request: Request, plan: Plan, steps: int) -> tuple[Request, Plan, int]:
    """The request for steps of several global batches, and how many of these `steps` small ones are."""
    recipe = load_recipe(request.script, request.seed)
    small = dataclasses.replace(recipe, global_batch=request.global_batch or recipe.global_batch)
    stop, size = samples_to_train(request, len(recipe.dataset), small.global_batch), len(recipe.dataset)
    seen = number = 0
    while seen < stop:
        seen += global_batch_at(seen, size, plan.global_batch).samples
        number += 1
    return msgspec.structs.replace(request, global_batch=plan.global_batch), plan, number


def _part_of_way(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], request: Request) -> float:
    """How far `ours` are from `theirs`, over how far those are from where all began."""
    start = load_recipe(request.script, request.seed).model
    if request.weights:
        load_weights(start, request.weights)
    began = {n: p.detach() for n, p in start.named_parameters()}
    ends = {n: t.detach().cpu() for n, t in theirs.items() if n in began}
    way = sum(float((t.double() - began[n].double()).square().sum()) for n, t in ends.items())
    off = sum(float((ours[n].double() - t.double()).square().sum()) for n, t in ends.items())
    return (off / way) ** 0.5 if way else 0.0


def _by_hosts(
    request: Request, plan: Plan, steps: int, folder: Path
) -> tuple[float, dict[str, torch.Tensor]]:
    """The first gradients' largest error beside plain hosts that exchange as `plan` says, and their ends."""
    exchange = exchange_of(plan.reductions, plan.devices)
    assert exchange is not None and plan.fewer is not None
    plains = [_plain(request, plan) for _ in exchange.groups]
    hosts = [_host(plain) for plain in plains]
    recipe, seen, batches, rates = plains[0].recipe, 0, [], []
    has_norms = any(isinstance(m, _BatchNorm) for m in recipe.model.modules())
    for _ in range(steps):
        batch = global_batch_at(seen, len(recipe.dataset), recipe.global_batch)
        order = epoch_order(len(recipe.dataset), batch.epoch, request.seed, shuffle=recipe.shuffle)
        own = micro_batches(resized(plan, batch.samples))
        parts = [
            [m for p, row in zip(plan.pipelines, own, strict=True) if p.devices[0] in group for m in row]
            for group in exchange.groups
        ]
        parts = parts if has_norms else [[[i for m in row for i in m]] for row in parts]
        batches.append(([int(i) for i in order[batch.start : batch.stop]], parts))
        rates.append(recipe.schedule(seen) if recipe.schedule else 1.0)
        seen += batch.samples
    base = [group["lr"] for group in hosts[0].optimizer.param_groups]

    def set_rate(host: PlainHost, step: int) -> None:
        for group, rate in zip(host.optimizer.param_groups, base, strict=True):
            group["lr"] = rate * rates[step]

    ends = run_hosts(hosts, plan.fewer, batches, set_rate)
    worst = 0.0
    for rank, device in enumerate(plan.devices):
        host = hosts[exchange.groups.index(exchange.group_of(device))]
        if host.first_gradient:
            held = load_file(folder / GRADIENT_FILE.format(rank))
            worst = max(worst, _distance(held, host.first_gradient))
    return worst, ends


def _host(plain: _Plain) -> PlainHost:
    recipe, keyed = plain.recipe, keyed_layers(plain.recipe.model)

    def loss_and_weight(indices: list[int]) -> tuple[torch.Tensor, float]:
        return plain.loss_and_weight(recipe.collate_fn([recipe.dataset[i] for i in indices]), len(indices))

    return PlainHost(
        recipe.model,
        plain.optimizer,
        loss_and_weight,
        recipe.max_norm,
        lambda step, positions: dropout_keys(keyed, step, positions),
    )


def micro_batches(plan: Plan) -> list[list[list[int]]]:
    """By pipeline, the positions in the global batch of each micro-batch.

    Example: pipelines of 3 and 2 samples in twos: [[0, 1], [2]] and [[3, 4]].
    """
    places = iter(range(plan.global_batch))
    return [[list(islice(places, n)) for n in pipeline.micro_batch_sizes] for pipeline in plan.pipelines]


def merged_waves(micro_batches: list[list[list[int]]]) -> list[list[int]]:
    """The micro-batches with the same number as one. Example: those above are [0, 1, 3, 4] and [2]."""
    return [[i for m in wave for i in m] for wave in zip_longest(*micro_batches, fillvalue=[])]


def _merged(held: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: grad for own in held for name, grad in own.items()}


def _distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """‖ours - theirs‖ / ‖theirs‖; a tensor that only one side has counts in full."""
    square = norm = 0.0
    for name in ours.keys() | theirs.keys():
        a, b = ours.get(name), theirs.get(name)
        if b is not None:
            norm += float(b.double().square().sum())
        difference = a.double() - b.double() if a is not None and b is not None else (a if b is None else b)
        assert difference is not None
        square += float(difference.double().square().sum())
    return (square / norm) ** 0.5 if norm else square**0.5
