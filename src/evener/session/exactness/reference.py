"""What a run of a plan is held against: plain loops over the same recipe, cut as its BatchNorm demands."""

import dataclasses
from collections.abc import Callable, Mapping
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from evener.core.exchange import exchange_of
from evener.core.order import epoch_order, global_batch_at, resized
from evener.core.plan import Plan
from evener.runtime.dropout import dropout_keys, keyed_layers
from evener.session.checkpoints.tensors import (
    GRADIENT_FILE,
    load_weights,
)
from evener.session.exactness.plain import PlainLoop
from evener.session.exactness.plain_hosts import PlainHost, run_hosts
from evener.session.layout.precision import precision_parts
from evener.session.planning.decide import samples_to_train
from evener.session.planning.inexact import DROPOUT, inexact_parts
from evener.session.recipe import Recipe, in_dtype, load_recipe, with_keys, without_dropout
from evener.session.request import Request

DROPOUT_OFF = "dropout was switched off on both sides for this comparison"


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
    optimizer = recipe.make_optimizer([p for p in model.parameters() if p.requires_grad])
    problem = recipe.problem
    mean = problem.reduction == "mean"

    def loss_and_weight(batch: Any, size: int) -> tuple[torch.Tensor, float]:
        args, kwargs, target = problem.inputs(batch)
        weight = problem.weight_of(batch, size)
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            result = recipe.loss(model(*args, **kwargs), target)
        loss = result[0] if isinstance(result, tuple) else result
        return (loss * weight if mean else loss), weight

    return _Plain(recipe, optimizer, loss_and_weight, notes)


def reference(
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


def at_once(request: Request, plan: Plan, steps: int) -> tuple[Request, Plan, int]:
    """The request for steps of several global batches, and how many of these `steps` small ones are."""
    recipe = load_recipe(request.script, request.seed)
    small = dataclasses.replace(recipe, global_batch=request.global_batch or recipe.global_batch)
    stop, size = samples_to_train(request, len(recipe.dataset), small.global_batch), len(recipe.dataset)
    seen = number = 0
    while seen < stop:
        seen += global_batch_at(seen, size, plan.global_batch).samples
        number += 1
    return msgspec.structs.replace(request, global_batch=plan.global_batch), plan, number


def part_of_way(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], request: Request) -> float:
    """How far `ours` are from `theirs`, over how far those are from where all began."""
    start = load_recipe(request.script, request.seed).model
    if request.weights:
        load_weights(start, request.weights)
    began = {n: p.detach() for n, p in start.named_parameters()}
    ends = {n: t.detach().cpu() for n, t in theirs.items() if n in began}
    way = sum(float((t.double() - began[n].double()).square().sum()) for n, t in ends.items())
    off = sum(float((ours[n].double() - t.double()).square().sum()) for n, t in ends.items())
    return (off / way) ** 0.5 if way else 0.0


def by_hosts(request: Request, plan: Plan, steps: int, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
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
            worst = max(worst, distance(held, host.first_gradient))
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


def merged(held: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Each device's tensors, a later one's in the place of an earlier one's."""
    return {name: grad for own in held for name, grad in own.items()}


def differing_buffers(ours: Mapping[str, Tensor], model: nn.Module, bound: float) -> tuple[str, ...]:
    """The buffers of `model`, BatchNorm's aside, that `ours` has otherwise, by `bound` of their norm."""
    norms = {name for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    return tuple(
        name
        for name, buffer in model.named_buffers()
        if name in ours
        and name.rpartition(".")[0] not in norms
        and not _alike(ours[name], buffer.detach().cpu(), bound)
    )


def _alike(ours: Tensor, theirs: Tensor, bound: float) -> bool:
    if ours.shape != theirs.shape or not theirs.is_floating_point():
        return torch.equal(ours, theirs)
    most = bound * float(theirs[theirs.isfinite()].norm())  # a mask has infinities
    return bool(torch.isclose(ours, theirs, rtol=0.0, atol=most, equal_nan=True).all())


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
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
