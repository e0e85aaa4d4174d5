"""Random plans of every shape for models of many families, run on real processes and in a plain loop.

Every instance is a model with a plan: any cuts, any device for any stage, several pipelines with cuts and
micro-batches of their own, stages shared by samples, frozen parameters, masked labels. It takes two steps, a
whole global batch and an epoch's smaller last one. Processes run many instances one after another.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.shape_models import FAMILIES, Loss, inputs_of, samples_for, valid
from evener.core.fleet import Device, Fleet
from evener.core.order import epoch_order
from evener.core.ownership import WHOLE_BACKWARDS, holders_of
from evener.core.plan import Held, Ownership, Pipeline, Plan, Share, Stage
from evener.runtime.cutting import legal_cuts
from evener.runtime.ranks import Ranks
from evener.session.layout.lay_out import lay_out
from evener.session.layout.seat import Seat
from evener.session.loop.steps import Steps
from evener.session.meeting import Meeting
from evener.session.recipe import Recipe
from evener.session.site import open_site

BOUND = {"float32": 1e-6, "float64": 1e-12}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One model with one plan. The epoch holds `dataset_size` samples: one global batch and some more."""

    family: str
    plan: Plan
    dataset_size: int
    seed: int
    dtype: str = "float32"
    frozen: tuple[str, ...] = ()
    reduction: str = "mean"
    masked: bool = False
    max_norm: float | None = None

    @property
    def bound(self) -> float:
        """How far its gradient may be from the plain loop's."""
        return BOUND["float32" if FAMILIES[self.family].always_float32 else self.dtype]


def names_of(world_size: int) -> tuple[str, ...]:
    """The devices of a job of `world_size` processes."""
    return tuple(f"h/{'abcd'[i]}" for i in range(world_size))


@cache
def pieces_of(family: str) -> tuple[tuple[str, ...], ...]:
    """The family's layers in the order in which they run, in runs that no cut may part."""
    model = FAMILIES[family].build()
    args, kwargs, _ = inputs_of(_batch(samples_for(family, 3, torch.float32, 0, masked=False)))
    points = legal_cuts(model, example=(args, kwargs))
    pieces = [[points[0].after]]
    for point in points:
        if point.legal:
            pieces.append([])
        pieces[-1].append(point.before)
    return tuple(map(tuple, pieces))


def random_instance(rng: random.Random, family: str, world_size: int) -> Instance:
    """A model of `family` with a plan that uses all of `world_size` devices."""
    pieces = pieces_of(family)
    layers = [name for piece in pieces for name in piece]
    plan = None
    while plan is None or set(plan.devices) != set(names_of(world_size)) or plan.is_data_parallel:
        plan = _random_plan(rng, pieces, names_of(world_size))
    words = FAMILIES[family].data == "words"
    return Instance(
        family=family,
        plan=plan,
        dataset_size=plan.global_batch + rng.randint(1, max(1, plan.global_batch - 1)),
        seed=rng.randrange(2**16),
        frozen=tuple(rng.sample(layers, rng.randint(0, len(layers) // 2))) if rng.random() < 0.4 else (),
        reduction=rng.choice(("mean", "sum")),
        masked=words and rng.random() < 0.5,
        max_norm=rng.choice((None, None, 0.05)),
    )


def _random_plan(rng: random.Random, pieces: Sequence[tuple[str, ...]], devices: Sequence[str]) -> Plan:
    pipelines = []
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        micro_batch = rng.randint(1, 4)
        cuts = sorted(rng.sample(range(1, len(pieces)), rng.randint(0, min(5, len(pieces) - 1))))
        stages = []
        for low, high in pairwise([0, *cuts, len(pieces)]):
            count = rng.choice((1, 1, 1, rng.randint(1, min(micro_batch, len(devices)))))
            parts = _parts(rng, micro_batch, count)
            shares = tuple(
                Share(devices=(d,), samples=n) for d, n in zip(rng.sample(devices, count), parts, strict=True)
            )
            layers = tuple(name for piece in pieces[low:high] for name in piece)
            stages.append(Stage(layers=layers, shares=shares, recompute=rng.random() < 0.2))
        samples = rng.randint(1, 5) * micro_batch - rng.randint(0, micro_batch - 1)
        pipelines.append(Pipeline(samples=samples, micro_batch=micro_batch, stages=tuple(stages)))
    total = sum(p.samples for p in pipelines)
    return Plan(global_batch=total, pipelines=tuple(pipelines), schedule=rng.choice(SCHEDULES))


def with_owners(instance: Instance, rng: random.Random, held: Held) -> Instance:
    """The instance with state of random layers in random parts of their holders.

    With "gradients" its plan is another one, in which every device has one stage.
    """
    plan = instance.plan
    if held == "gradients":
        plan = _of_one_stage_each(rng, pieces_of(instance.family), plan.devices)
    owners = []
    for layer, devices in holders_of(plan).items():
        parts = {d: rng.choice((0, 1, 2, 5)) for d in devices}
        if any(parts.values()):
            owners.append(Ownership(layer=layer, parts=parts, held=held))
    size = plan.global_batch + rng.randint(1, max(1, plan.global_batch - 1))
    return replace(instance, plan=msgspec.structs.replace(plan, owners=tuple(owners)), dataset_size=size)


def _of_one_stage_each(rng: random.Random, pieces: Sequence[tuple[str, ...]], devices: Sequence[str]) -> Plan:
    """A plan that cuts the model, in which no device has two stages; some stages are shared."""
    names, pipelines = rng.sample(devices, len(devices)), []
    second = rng.randint(1, len(names) - 1)
    for own in (names[:second], names[second:]):
        few = rng.randint(1, len(own))
        groups = [own[i::few] for i in range(few)]
        micro_batch = max(map(len, groups)) + rng.randint(0, 2)
        cuts = sorted(rng.sample(range(1, len(pieces)), few - 1))
        stages = []
        for group, (low, high) in zip(groups, pairwise([0, *cuts, len(pieces)]), strict=True):
            parts = zip(group, _parts(rng, micro_batch, len(group)), strict=True)
            shares = tuple(Share(devices=(d,), samples=n) for d, n in parts)
            layers = tuple(name for piece in pieces[low:high] for name in piece)
            stages.append(Stage(layers=layers, shares=shares, recompute=rng.random() < 0.2))
        samples = rng.randint(1, 4) * micro_batch - rng.randint(0, micro_batch - 1)
        pipelines.append(Pipeline(samples=samples, micro_batch=micro_batch, stages=tuple(stages)))
    total = sum(p.samples for p in pipelines)
    return Plan(global_batch=total, pipelines=tuple(pipelines), schedule=rng.choice(WHOLE_BACKWARDS))


def _parts(rng: random.Random, whole: int, count: int) -> list[int]:
    """`whole` in `count` parts of one or more."""
    edges = [0, *sorted(rng.sample(range(1, whole), count - 1)), whole]
    return [b - a for a, b in pairwise(edges)]


def draw(seed: int, count: int, families: Sequence[str] = tuple(FAMILIES)) -> dict[int, list[Instance]]:
    """`count` instances by number of processes, families in turn."""
    rng = random.Random(seed)
    drawn: dict[int, list[Instance]] = {2: [], 3: [], 4: []}
    for i in range(count):
        world_size = (2, 3, 4)[i // len(families) % 3]
        drawn[world_size].append(random_instance(rng, families[i % len(families)], world_size))
    return {n: instances for n, instances in drawn.items() if instances}


def features(instance: Instance) -> list[str]:
    """What is special about the plan, to show that every shape was met."""
    plan, found = instance.plan, [instance.plan.schedule, instance.family]
    maps = [[s.shares[0].devices[0] for s in p.stages] for p in plan.pipelines]
    if any(
        row.count(d) > 1 and _apart([i for i, x in enumerate(row) if x == d]) for row in maps for d in row
    ):
        found.append("not neighbours on one device")
    if len({tuple(s.layers for s in p.stages) for p in plan.pipelines}) > 1:
        found.append("pipelines cut differently")
    if any(len(s.shares) > 1 for p in plan.pipelines for s in p.stages):
        found.append("shared stage")
    if any(p.samples % p.micro_batch for p in plan.pipelines):
        found.append("uneven micro-batches")
    found += [w for w in ("frozen", "masked", "max_norm") if getattr(instance, w)]
    found += ["recompute"] if any(s.recompute for p in plan.pipelines for s in p.stages) else []
    return found


def _apart(places: list[int]) -> bool:
    return places[-1] - places[0] >= len(places)


def recipe_of(instance: Instance) -> Recipe:
    """The training job of an instance, the same in every process."""
    torch.manual_seed(instance.seed)
    dtype = getattr(torch, instance.dtype)
    model = FAMILIES[instance.family].build().to(dtype)
    for name in instance.frozen:
        whole = name != "(root)"
        for p in model.get_submodule(name if whole else "").parameters(recurse=whole):
            p.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        next(model.parameters()).requires_grad_(True)
    return Recipe(
        model=model,
        dataset=samples_for(
            instance.family, instance.dataset_size, dtype, instance.seed, masked=instance.masked
        ),
        loss=Loss(instance.reduction),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        global_batch=instance.plan.global_batch,
        inputs=inputs_of,
        weight=valid if FAMILIES[instance.family].data == "words" else None,
        max_norm=instance.max_norm,
    )


def plain(instance: Instance) -> list[Gradients]:
    """The gradients that the optimiser gets in a plain loop over whole global batches, by step."""
    recipe = recipe_of(instance)
    model, data = recipe.model.train(), recipe.dataset
    optimizer = recipe.optimizer([p for p in model.parameters() if p.requires_grad])
    order = [int(i) for i in epoch_order(len(data), 0, instance.seed)]
    steps = []
    for chosen in (order[: recipe.global_batch], order[recipe.global_batch :]):
        optimizer.zero_grad()
        batch = _batch([data[i] for i in chosen])
        args, kwargs, target = inputs_of(batch)
        loss = Loss("sum")(model(*args, **kwargs), target)
        weight = float(valid(batch))
        if weight:
            (loss / weight).backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm or float("inf"))
            steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
    return steps


def run_instances(rank: int, world_size: int, instances: list[Instance]) -> list[list[Gradients]]:
    """By instance and step, the gradients that this process's optimiser gets."""
    where: list[Any] = [None]
    if rank == 0:
        ours = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        where = [ours.port]
    dist.broadcast_object_list(where)
    store = ours if rank == 0 else dist.TCPStore("127.0.0.1", where[0], is_master=False)
    names = names_of(world_size)
    fleet = Fleet(devices=tuple(Device(name=n, kind="cpu", threads=1) for n in names))
    site = open_site(fleet.devices[rank], rehearse=False)
    found = []
    for number, instance in enumerate(instances):
        recipe = recipe_of(instance)
        recipe.model.train()
        meeting = Meeting(dist.PrefixStore(f"instance{number}", store), rank, world_size)
        ranks = Ranks(names, names[rank])
        try:
            seat = Seat(
                recipe=recipe,
                plan=instance.plan,
                ranks=ranks,
                site=site,
                fleet=fleet,
                meeting=meeting,
                seed=instance.seed,
            )
            layout = lay_out(seat)
            steps = Steps(seat, layout)
            seen: list[Gradients] = []
            held, owned = layout.parameters, layout.holding.owned
            in_parts = owned.whole_gradients if owned else dict
            steps.optimizer.register_step_pre_hook(
                lambda *_, held=held, seen=seen, in_parts=in_parts: seen.append(
                    {n: p.grad.clone() for n, p in held.items() if p.grad is not None} | in_parts()
                )
            )
            for _ in steps.run(instance.dataset_size):
                pass
            steps.close()
        except Exception as e:
            raise RuntimeError(f"instance {number}: {instance}") from e
        found.append(seen)
        dist.barrier()  # a channel that closes early would look like a lost peer
    return found


def error_of(instance: Instance, held: Sequence[list[Gradients]]) -> float:
    """‖g - g*‖ / ‖g*‖ over all parameters, of the worst step and device; infinite where something lacks."""
    wanted = plain(instance)
    worst = 0.0
    if any(len(steps) != len(wanted) for steps in held):
        return float("inf")
    for number, want in enumerate(wanted):
        if set(want) != {name for steps in held for name in steps[number]}:
            return float("inf")
        norm = sum(float(g.double().square().sum()) for g in want.values()) ** 0.5
        merged = {n: g for steps in held for n, g in steps[number].items()}
        for steps in held:  # each holder's own copy in turn: copies must be right as well
            off = sum(
                float((g.double() - want[n].double()).square().sum())
                for n, g in (merged | steps[number]).items()
            )
            worst = max(worst, off**0.5 / norm if norm else off**0.5)
    return worst


def _batch(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(samples)
