"""State in parts in a run: what was asked for becomes the plan's owners, and a device's part of them.

--state gradients                       parts by what each device's memory leaves, from the planner
--state gradients --parts 5,3,2         these parts, in the order of the fleet
--plan with owners                      as they stand there
"""

from collections.abc import Mapping, Sequence
from typing import cast

import msgspec
import torch
from torch import nn

from evener.core.fleet import Fleet
from evener.core.layers import find_layers
from evener.core.ownership import WORDS, check_owners, held_by, holders_of
from evener.core.plan import HELD, Held, Ownership, Pipeline, Plan, Share, Stage
from evener.core.seams import Post, Wire
from evener.core.words import counted
from evener.cost.exchange import compressed_parts
from evener.errors import PlanMismatchError, UsageError
from evener.rehearsal.pacer import Pacer
from evener.rehearsal.post import PacedPost
from evener.rehearsal.real import Moments, RealPost
from evener.rehearsal.real_hosts import inside_hosts
from evener.runtime.owning.held import HeldStages
from evener.runtime.owning.means import Means
from evener.runtime.owning.owned import Owned
from evener.runtime.owning.post import GroupPost
from evener.session.layout.seat import Seat
from evener.session.recipe import Recipe
from evener.session.request import Request

NOT_ELASTIC = "state is held in parts: the job ends when a device is lost, and none may join"
ORDER = "1f1b"


def with_owners(plan: Plan, request: Request, fleet: Fleet, model: nn.Module) -> Plan:
    """`plan` with the parts that the user gave, or with parts by memory where it was given without owners.

    Example: --state optimizer --parts 5,3,2 on a plan of three devices without owners.
    """
    names, held = request.parts, request.state
    if names is not None and held == "replicated" and not plan.owners:
        raise UsageError(
            "--parts says who holds how much of what is held in parts, and nothing is",
            remedy="with --state optimizer, gradients or parameters",
        )
    given = request.plan is not None and not plan.owners and held in HELD
    if names is None and not given:
        return plan
    if plan.fewer:
        raise UsageError(
            f"--state {held} and the plan's {plan.fewer} exclude each other",
            numbers="owners of state need the gradients of every step",
            remedy="one of them",
        )
    kept = cast(Held, held_by(plan) or (held if held in HELD else "optimizer"))
    parts, how = (names, "as given") if names else _by_memory(fleet, plan)
    if not any(parts.values()):
        raise UsageError("the parts of --parts are all 0", remedy="at least one device that holds something")
    plan = _with_holders(plan, [d for d, part in parts.items() if part])
    owners = _owners(plan, _layers_with_parameters(model), parts, kept)
    packed = compressed_parts(plan.reductions)
    found = msgspec.structs.replace(
        plan,
        owners=owners,
        schedule=ORDER if plan.is_data_parallel else plan.schedule,
        reductions=(),
        prediction=None,
        inexact=tuple(sentence for sentence in plan.inexact if sentence not in packed),
        why=_reason(plan, kept, parts, how),
    )
    check_owners(found, [layer.name for layer in find_layers(model)])
    return found


def check_owned(plan: Plan, recipe: Recipe, tables: tuple[str, ...]) -> None:
    """PlanMismatchError for what goes not together with owners in this version."""
    if not plan.owners:
        return
    check_owners(plan, [layer.name for layer in find_layers(recipe.model)])
    stages = [stage for _, _, stage in plan.numbered_stages()]
    whole = held_by(plan) != "parameters"
    lower = recipe.precision != "float32" or any(s.precision not in (None, "float32") for s in stages)
    away = (
        "stealing, which changes who runs what within a step"
        if plan.steal
        else f"tables that lie apart ({', '.join(tables)})"
        if tables
        else 'batch_norm="wave", whose devices meet in every layer'
        if recipe.batch_norm == "wave" and not whole
        else "recompute, which runs layers once more than their parameters are gathered"
        if any(s.recompute for s in stages) and not whole
        else "a precision below float32, whose copies of the parameters would stay"
        if lower and not whole
        else f"the schedule {plan.schedule!r}, in which several micro-batches are alive at once"
        if plan.schedule != ORDER and not whole
        else "stages whose parameters or optimiser live on the host"
        if any(s.residence for s in stages)
        else "fewer exchanges"
        if plan.fewer
        else ""
    )
    if away:
        raise PlanMismatchError(
            f"owners that keep {held_by(plan)} in parts do not go with {away}",
            remedy="leave that out, or hold less in parts (--state gradients, optimizer or replicated)",
        )


def open_owned(seat: Seat, wire: Wire, held: HeldStages | None = None) -> Owned:
    """This device's part under the plan's owners; its model then lies on the device as far as it is held.

    `wire` joins all devices of the plan; `held` is what the device has where pipelines cut the model.
    """
    model, ranks, site, fleet = seat.recipe.model, seat.ranks, seat.site, seat.fleet
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = seat.recipe.make_optimizer(trained or [nn.Parameter(torch.zeros(0))])
    group = seat.new_group(ranks.devices, "gloo") if ranks.world_size > 1 else None
    post: Post = GroupPost(group, ranks.devices)
    if seat.rehearse:
        assert isinstance(site.driver, Pacer)
        if site.real_links:
            post = RealPost(PacedPost(post, site.driver, inside_hosts(fleet)), Moments(site.driver))
        else:
            post = PacedPost(post, site.driver, fleet)
    means = Means(ranks=ranks, post=post, wire=wire, device=site.torch_device, now=site.driver.now)
    return Owned(model, optimizer, seat.plan, means, held)


def told(owned: Owned) -> tuple[str, ...]:
    """Sentences on what is held how."""
    parts = owned.bytes_by_device()
    whole = sum(parts.values()) or 1
    shares = ", ".join(f"{d} {n / whole:.1%}" for d, n in parts.items())
    found = [f"{owned.held} held in parts by {counted(len(owned.units), 'unit')}: {shares}"]
    if owned.uncut:
        kind = type(owned.optimizer).__name__
        found.append(f"{kind} needs whole parameters: {len(owned.uncut)} of them are owned uncut")
    return tuple(found)


def _reason(plan: Plan, kept: Held, parts: Mapping[str, int], how: str) -> str:
    """Why the plan is as it runs. Example: "the optimiser's state in parts 5:3 as given, ..."."""
    taken = plan.samples_by_device()
    samples = ":".join(str(taken.get(name, 0)) for name in parts)
    return (
        f"{WORDS[kept]} in parts {':'.join(map(str, parts.values()))} {how}, samples {samples} as planned "
        f"without them ({', '.join(parts)})"
    )


def _owners(plan: Plan, layers: Sequence[str], parts: Mapping[str, int], kept: Held) -> tuple[Ownership, ...]:
    """`parts` of each of `layers`; in a plan that cuts the model, of those that several devices hold.

    Example: two pipelines cut alike on (a, b) and (c, d), parts 4, 3, 2, 1: 4:2 of the first layers, 3:1 of
    the others.
    """
    if plan.is_data_parallel:
        return tuple(Ownership(layer=n, parts=dict(parts), held=kept) for n in layers)
    idle = [d for d, part in parts.items() if part and d not in plan.devices]
    holders = {n: held for n, held in holders_of(plan).items() if n in layers and len(held) > 1}
    found = {n: {d: parts.get(d, 0) for d in held} for n, held in holders.items()}
    without = [n for n, own in found.items() if not any(own.values())]
    if idle or without or not found:
        raise UsageError(
            f"the plan gives {', '.join(idle)} no layer, so no part of any state"
            if idle
            else f"the parts of all devices that hold {', '.join(without[:8])} are 0"
            if without
            else "the plan has no layer on several devices, so no state to be held in parts",
            numbers=f"parts {':'.join(map(str, parts.values()))} of {', '.join(parts)}",
            remedy="parts for devices that hold the same layers, or a plan in which several do",
        )
    return tuple(Ownership(layer=n, parts=found[n], held=kept) for n in layers if n in found)


def _layers_with_parameters(model: nn.Module) -> list[str]:
    layers = find_layers(model)
    return [x.name for x in layers if any(True for _ in x.module.parameters(recurse=x.whole))]


def _with_holders(plan: Plan, owners: Sequence[str]) -> Plan:
    """`plan` with a pipeline of no samples for each owner that it left out: those hold state alone.

    Plans of several stages stay as they are: who holds no layer has no part there.
    """
    more = [d for d in owners if d in {x.device for x in plan.left_out}]
    layers = [stage.layers for _, _, stage in plan.numbered_stages()]
    if not more or len(layers) != len(plan.pipelines):
        return plan
    holders = tuple(
        Pipeline(
            samples=0,
            micro_batch=1,
            stages=(Stage(layers=layers[0], shares=(Share(devices=(d,), samples=1),)),),
        )
        for d in more
    )
    left_out = tuple(x for x in plan.left_out if x.device not in more)
    return msgspec.structs.replace(plan, pipelines=(*plan.pipelines, *holders), left_out=left_out)


def _by_memory(fleet: Fleet, plan: Plan) -> tuple[dict[str, int], str]:
    """(MiB of each device of the plan, how that was found); equal parts where a memory is not known."""
    memories = {d: fleet.device(d).memory_bytes for d in plan.devices}
    unknown = [d for d, memory in memories.items() if memory is None]
    if unknown:
        return dict.fromkeys(plan.devices, 1), f"equal, as the memory of {', '.join(unknown)} is not known"
    known = {d: max(1, round(m.value / 2**20)) for d, m in memories.items() if m is not None}
    return known, "by the memory of each device"
