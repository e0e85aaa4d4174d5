"""Changed worlds: the same job with a device dropped, added, slowed or priced, or with faster links."""

from dataclasses import dataclass

from msgspec.structs import replace

from evener.core.figures import Curve, Figure
from evener.core.fleet import Device, Fleet
from evener.core.profile import Profile, StepTiming, Timing
from evener.errors import UnknownNameError, UsageError

SPELLING = "drop NAME | add KIND [HOST] | slow NAME xFACTOR | price NAME AMOUNT | links xFACTOR"


@dataclass(frozen=True, kw_only=True)
class World:
    """A fleet and the profile that goes with it."""

    fleet: Fleet
    profile: Profile


def changed(world: World, change: str) -> World:
    """The world after `change`, one of `SPELLING`, or several joined by ";".

    UsageError for another spelling, UnknownNameError for a device or kind that is not there.
    Example: "slow lab/gpu0 x2" makes all seconds of lab/gpu0 twice as long.
    """
    for one in change.split(";"):
        world = _changed(world, one.split(), one.strip())
    return world


def usual_changes(fleet: Fleet) -> tuple[str, ...]:
    """What people ask first: would faster links help, would one more device of a kind?"""
    kinds = dict.fromkeys(d.kind for d in fleet.devices)
    return (*(("links x2",) if fleet.links else ()), *(f"add {kind}" for kind in kinds))


def _changed(world: World, words: list[str], text: str) -> World:
    match words:
        case ["drop", name]:
            world.fleet.device(name)
            rest = tuple(d.name for d in world.fleet.devices if d.name != name)
            if not rest:
                raise UsageError(f"{text!r} leaves no device", remedy="another change")
            return World(fleet=world.fleet.only(rest), profile=world.profile)
        case ["add", *kind_and_host] if kind_and_host:
            return _added(world, " ".join(kind_and_host))
        case ["slow", name, factor]:
            return _slowed(world, world.fleet.device(name), _factor(factor, text))
        case ["price", name, amount]:
            price = Figure(value=_factor(amount, text), source="assumed")
            return _with(world, replace(world.fleet.device(name), price_per_hour=price))
        case ["links", factor]:
            times = _factor(factor, text)
            links = tuple(replace(x, curve=_faster(x.curve, times)) for x in world.fleet.links)
            return World(fleet=replace(world.fleet, links=links), profile=world.profile)
    raise UsageError(f"cannot read the change {text!r}", remedy=SPELLING)


def _factor(word: str, text: str) -> float:
    try:
        value = float(word.removeprefix("x"))
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(f"{word!r} in {text!r} is no positive number", remedy=SPELLING)
    return value


def _with(world: World, device: Device, profile: Profile | None = None) -> World:
    devices = tuple(device if d.name == device.name else d for d in world.fleet.devices)
    return World(fleet=replace(world.fleet, devices=devices), profile=profile or world.profile)


def _added(world: World, kind_and_host: str) -> World:
    """A copy of a device of that kind; on its host, or on the one named last."""
    hosts = {d.host for d in world.fleet.devices}
    kind, _, host = kind_and_host.rpartition(" ")
    if host not in hosts or not kind:
        kind, host = kind_and_host, ""
    like = next((d for d in world.fleet.devices if d.kind == kind and d.host == (host or d.host)), None)
    like = like or next((d for d in world.fleet.devices if d.kind == kind), None)
    if like is None:
        kinds = dict.fromkeys(d.kind for d in world.fleet.devices)
        raise UnknownNameError(
            f"the fleet has no device of kind {kind!r}", remedy=f"one of: {', '.join(kinds)}"
        )
    taken = {d.name for d in world.fleet.devices}
    name = next(n for i in range(len(taken) + 1) if (n := f"{host or like.host}/added{i}") not in taken)
    copy = replace(like, name=name, hardware_id="", index=None)
    return World(fleet=replace(world.fleet, devices=(*world.fleet.devices, copy)), profile=world.profile)


def _slowed(world: World, device: Device, factor: float) -> World:
    """The device gets a kind of its own, whose seconds are those of its kind times the factor."""
    kind = f"{device.kind} ({factor:g} times slower)"

    def timing(row: Timing) -> Timing:
        keys = ("forward_s", "backward_s", "update_s")
        return replace(row, kind=kind, **{k: _times(getattr(row, k), factor) for k in keys})

    def step(row: StepTiming) -> StepTiming:
        keys = ("forward_s", "backward_s", "update_s", "input_s", "step_overhead_s")
        return replace(row, kind=kind, **{k: _times(getattr(row, k), factor) for k in keys})

    old = world.profile
    profile = replace(
        old,
        timings=(*old.timings, *(timing(t) for t in old.timings if t.kind == device.kind)),
        steps=(*old.steps, *(step(s) for s in old.steps if s.kind == device.kind)),
    )
    return _with(world, replace(device, kind=kind), profile)


def _times(figure: Figure | None, factor: float) -> Figure | None:
    return None if figure is None else replace(figure, value=figure.value * factor)


def _faster(curve: Curve, factor: float) -> Curve:
    return replace(curve, points=tuple((b, s / factor) for b, s in curve.points))
