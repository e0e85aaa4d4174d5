"""Changed worlds: the same job with a device dropped, added, slowed or priced, or with faster links."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as replaced

from msgspec.structs import replace

from evener.core.catalogue import known_device, near_kinds, with_table
from evener.core.figures import Figure
from evener.core.fleet import Device, Fleet
from evener.core.profile import Profile
from evener.cost.fewer import with_links
from evener.errors import UnknownNameError, UsageError
from evener.planner.refit import faster, merge_slices, split_card, with_faster_link, with_link, with_memory
from evener.planner.slowed import slowed

SPELLING = (
    "drop NAME | add KIND [HOST] | slow NAME xFACTOR | price NAME AMOUNT | links xFACTOR | batch xFACTOR | "
    "link A B xFACTOR | link A B KIND | memory NAME xFACTOR | split NAME SLICE ... | merge NAME NAME ..."
)


@dataclass(frozen=True, kw_only=True)
class World:
    """A fleet and the profile that goes with it; `batch` is what the job's global batch is multiplied by.

    `reprofile`, where the profile was not measured, makes it anew for a changed fleet. `assumed` says what a
    change took for granted.
    """

    fleet: Fleet
    profile: Profile
    batch: float = 1.0
    reprofile: Callable[[Fleet], Profile] | None = None
    assumed: tuple[str, ...] = ()


def changed(world: World, change: str) -> World:
    """The world after `change`, one of `SPELLING`, or several joined by ";".

    UsageError for another spelling, UnknownNameError for a device or kind that is not there.
    Example: "slow lab/gpu0 x2" makes all seconds of lab/gpu0 twice as long.
    """
    for one in change.split(";"):
        world = _changed(world, one.split(), one.strip())
    if world.reprofile is not None:
        world = replaced(world, profile=world.reprofile(world.fleet))
    return world


def usual_changes(fleet: Fleet) -> tuple[str, ...]:
    """What people ask first: would faster links help, more samples a step, one more device of a kind?"""
    kinds = dict.fromkeys(d.kind for d in fleet.devices)
    return (*(("links x2",) if fleet.links else ()), "batch x2", *(f"add {kind}" for kind in kinds))


def _changed(world: World, words: list[str], text: str) -> World:
    match words:
        case ["drop", name]:
            world.fleet.device(name)
            rest = tuple(d.name for d in world.fleet.devices if d.name != name)
            if not rest:
                raise UsageError(f"{text!r} leaves no device", remedy="another change")
            return replaced(world, fleet=world.fleet.only(rest))
        case ["add", *kind_and_host] if kind_and_host:
            return _added(world, " ".join(kind_and_host))
        case ["slow", name, factor]:
            fleet, profile = slowed(world.fleet, world.profile, name, _factor(factor, text))
            return replaced(world, fleet=fleet, profile=profile)
        case ["price", name, amount]:
            price = Figure(value=_factor(amount, text), source="assumed")
            return _with(world, replace(world.fleet.device(name), price_per_hour=price))
        case ["links", factor]:
            times = _factor(factor, text)
            links = tuple(faster(x, times) for x in world.fleet.links)
            return replaced(world, fleet=with_links(world.fleet, links))
        case ["link", a, b, factor] if re.fullmatch(r"x[\d.]+", factor):
            return replaced(world, fleet=with_faster_link(world.fleet, a, b, _factor(factor, text)))
        case ["link", a, b, *kind] if kind:
            return replaced(world, fleet=with_link(world.fleet, a, b, " ".join(kind)))
        case ["memory", name, factor]:
            return replaced(world, fleet=with_memory(world.fleet, name, _factor(factor, text)))
        case ["split", name, *slices]:
            fleet, profile, said = split_card(world.fleet, world.profile, name, slices)
            assumed = (
                () if world.reprofile else said[:-1]
            )  # a profile made anew holds the slices' own figures
            return replaced(world, fleet=fleet, profile=profile, assumed=(*world.assumed, *assumed, said[-1]))
        case ["merge", *names] if names:
            return replaced(world, fleet=merge_slices(world.fleet, names))
        case ["batch", factor]:
            return replaced(world, batch=world.batch * _factor(factor, text))
    raise UsageError(f"cannot read the change {text!r}", remedy=SPELLING)


def _factor(word: str, text: str) -> float:
    try:
        value = float(word.removeprefix("x"))
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(f"{word!r} in {text!r} is no positive number", remedy=SPELLING)
    return value


def _with(world: World, device: Device) -> World:
    devices = tuple(device if d.name == device.name else d for d in world.fleet.devices)
    return replaced(world, fleet=replace(world.fleet, devices=devices))


def _added(world: World, kind_and_host: str) -> World:
    """A copy of a device of that kind; on its host, or on the one named last."""
    hosts = {d.host for d in world.fleet.devices}
    kind, _, host = kind_and_host.rpartition(" ")
    if host not in hosts or not kind:
        kind, host = kind_and_host, ""
    like = next((d for d in world.fleet.devices if d.kind == kind and d.host == (host or d.host)), None)
    like = like or next((d for d in world.fleet.devices if d.kind == kind), None)
    if like is None:
        like = _from_table(world, kind, host or world.fleet.devices[0].host)
    taken = {d.name for d in world.fleet.devices}
    name = next(n for i in range(len(taken) + 1) if (n := f"{host or like.host}/added{i}") not in taken)
    copy = replace(like, name=name, hardware_id="", index=None)
    return replaced(world, fleet=replace(world.fleet, devices=(*world.fleet.devices, copy)))


def _from_table(world: World, kind: str, host: str) -> Device:
    """A device of a kind that only the catalogue or the profile knows; the latter has no known memory."""
    if known_device(kind) is None and kind not in world.profile.kinds:
        kinds = list(dict.fromkeys([*(d.kind for d in world.fleet.devices), *world.profile.kinds]))
        raise UnknownNameError(
            f"neither the fleet nor the profile nor the catalogue holds the kind {kind!r}",
            numbers=f"kinds of the fleet and the profile: {', '.join(kinds)}",
            remedy=f"one of: {', '.join(dict.fromkeys([*near_kinds(kind, kinds), *kinds]))}",
        )
    return with_table(Device(name=f"{host}/new", kind=kind))
