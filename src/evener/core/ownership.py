"""Which values of a layer each owner keeps, and how long they take to their owners and back.

parts 5, 3, 2 of 10 values    a: 0..4   b: 5..7   c: 8, 9

to owners    every device sends each owner the owner's slice of its gradients, and owners add up
from owners  every owner sends its slice of the parameters to all others
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from evener.core.buckets import BUCKET_BYTES
from evener.core.figures import Curve
from evener.core.fleet import Fleet, Link
from evener.core.plan import HELD, Ownership, Plan
from evener.core.split import apportion, spans_of
from evener.errors import PlanMismatchError

Span = tuple[int, int]
Messages = tuple[tuple[Curve, float, int], ...]
"""(curve, part of the buffer, how many such) of what passes one port."""

WORDS: dict[str, str] = {
    "optimizer": "the optimiser's state",
    "gradients": "gradients and the optimiser's state",
    "parameters": "parameters, gradients and the optimiser's state",
}
"""What is kept in parts, by `Ownership.held`, for people."""
WHOLE_BACKWARDS = ("gpipe", "1f1b", "interleaved")
"""Schedules in which a micro-batch's backward is one action."""


def owned_spans(owner: Ownership, devices: Sequence[str], count: int) -> dict[str, Span]:
    """Which of a layer's `count` values (its parameters laid end to end) each of `devices` owns, in order.

    Example: parts 5, 3, 2 of 10 values: 0..5, 5..8 and 8..10.
    """
    spans = spans_of(apportion(count, [owner.parts.get(d, 0) for d in devices]))
    return dict(zip(devices, spans, strict=True))


def owned_parts(owner: Ownership) -> dict[str, float]:
    """The part of 1 that each device owns. Example: 5, 3, 2 are 0.5, 0.3 and 0.2."""
    whole = sum(owner.parts.values())
    return {device: part / whole for device, part in owner.parts.items()}


def shares_of_state(plan: Plan) -> dict[str, float]:
    """The part that each device of `plan` owns, the mean over owned layers; empty where none is.

    Example: parts 5:3 of all layers: 0.625 and 0.375.
    """
    rows = [owned_parts(o) for o in plan.owners]
    return {d: sum(r.get(d, 0.0) for r in rows) / len(rows) for d in plan.devices} if rows else {}


def held_by(plan: Plan) -> str | None:
    """What owners of `plan` keep only their part of, the most of any layer; None where all is replicated."""
    return max((o.held for o in plan.owners), key=HELD.index, default=None)


def holders_of(plan: Plan) -> dict[str, tuple[str, ...]]:
    """By layer, the devices whose stages have it. Example: (a, b) and (c, d) cut alike: x on a and c."""
    found: dict[str, dict[str, None]] = {}
    for _, _, stage in plan.numbered_stages():
        devices = [d for share in stage.shares for d in share.devices]
        for layer in stage.layers:
            found.setdefault(layer, {}).update(dict.fromkeys(devices))
    return {layer: tuple(devices) for layer, devices in found.items()}


def check_owners(plan: Plan, layers: Sequence[str]) -> None:
    """PlanMismatchError unless the plan's owners can be carried out over `layers`, all of the model's.

    A layer has one set of owners, all of devices that hold it.
    """
    if not plan.owners:
        return
    names, holders = [o.layer for o in plan.owners], holders_of(plan)
    twice = sorted({n for n in names if names.count(n) > 1})
    strange = sorted({*names} - {*layers})
    away = sorted({d for o in plan.owners for d in o.parts} - set(plan.devices))
    elsewhere = [
        f"{d} of {o.layer}"
        for o in plan.owners
        for d, part in o.parts.items()
        if part and d not in holders.get(o.layer, plan.devices)
    ]
    if plan.reductions:
        what, remedy = "gradients go to their owners, not over reductions", "owners or reductions, not both"
    elif twice or strange or away or elsewhere:
        what = "the plan's owners name " + (
            f"{', '.join(twice)} twice"
            if twice
            else f"{', '.join(strange)}, no layers of the model"
            if strange
            else f"{', '.join(away)}, which have no pipeline"
            if away
            else f"{', '.join(elsewhere[:8])}, which they do not hold"
        )
        remedy = "one Ownership a layer, of devices that hold it (in a pipeline of 0 samples, maybe)"
    elif why := _not_in_stages(plan):
        what, remedy = why
    else:
        return
    raise PlanMismatchError(what, numbers=f"{len(names)} owned layers of {len(layers)}", remedy=remedy)


def _not_in_stages(plan: Plan) -> tuple[str, str] | None:
    """(what, remedy) where the plan cuts the model in a way in which not so much can be held in parts."""
    held, stages = (
        held_by(plan),
        Counter(d for _, _, s in plan.numbered_stages() for x in s.shares for d in x.devices),
    )
    several = [d for d, times in stages.items() if times > 1]
    if plan.is_data_parallel or held == "optimizer":
        return None
    if held == "parameters":
        return (
            "parameters in parts need pipelines of one stage and one device each: in longer ones several "
            "micro-batches are alive at once, and a layer's values are let go after one",
            "less in parts (gradients or optimizer), or a data-parallel plan",
        )
    if several:
        return (
            f"gradients in parts leave after every backward, and {', '.join(several)} has several stages "
            "whose backwards come in turns",
            'held "optimizer", or one stage a device',
        )
    if plan.schedule not in WHOLE_BACKWARDS:
        return (
            f"gradients in parts leave after every backward, which {plan.schedule} runs in two halves",
            f'held "optimizer", or one of {", ".join(WHOLE_BACKWARDS)}',
        )
    return None


@dataclass(frozen=True)
class Handover:
    """Seconds of one buffer to its owners, or back from them; the formula that the paced wire keeps to.

        seconds = max over ports of Σ curve(part · bytes) over the messages that leave or enter it

    A port is a device inside its host or with a link of its own, a bus where the link names one, and the host
    for other links between hosts; each way counts for itself. What has no link takes no time. With equal
    parts both ways together take what a ring does. Example: parts 5, 3, 2 of 10 MB at 1 ms + 1 GB/s: the
    first takes 5 MB from each of the others, 2 · (1 + 5) = 12 ms.
    """

    parts: tuple[tuple[str, float], ...]
    fleet: Fleet
    adds: bool = False

    def seconds(self, num_bytes: float) -> float:
        """Seconds for a buffer of `num_bytes`; `adds`: by the curves measured in reductions, if any."""
        if num_bytes <= 0:
            return 0.0
        return max((self._busy(port, num_bytes) for port in self._ports), default=0.0)

    def _busy(self, port: Messages, num_bytes: float) -> float:
        return sum(times * curve.seconds(part * num_bytes) for curve, part, times in port)

    @cached_property
    def _ports(self) -> tuple[Messages, ...]:
        """What passes each port. Devices that are alike (host, links, part) are looked at once."""
        linked = {end for link in self.fleet.links for end in (link.a, link.b)}
        alike: dict[tuple[str, str, float], list[str]] = {}
        for name, part in self.parts:
            key = (self.fleet.device(name).host, name if name in linked else "", part)
            alike.setdefault(key, []).append(name)
        held: dict[tuple[str, ...], Counter[tuple[int, float]]] = {}
        curves: dict[int, Curve] = {}
        for (_, _, part), targets in alike.items():
            for sources in alike.values() if part > 0 else ():
                same = int(sources is targets)
                link = self.fleet.link(sources[0], targets[same]) if len(targets) > same else None
                if link is None:
                    continue
                curve = (link.reduce_curve or link.curve) if self.adds else link.curve
                curves[id(curve)] = curve
                targets_each, sources_each = len(targets) - same, len(sources) - same
                for way, end, each in (("out", sources[0], targets_each), ("in", targets[0], sources_each)):
                    port = _port(self.fleet, link, end)
                    passing = each if port == (end,) else len(sources) * targets_each
                    held.setdefault((way, *port), Counter())[id(curve), part] += passing
        return tuple(
            dict.fromkeys(
                tuple((curves[key], part, times) for (key, part), times in sorted(counted.items()))
                for counted in held.values()
            )
        )


def handover(parts: Mapping[str, float], fleet: Fleet, *, adds: bool) -> Handover:
    """The handover between owners with these parts (any proportion), gradients (`adds`) or parameters."""
    whole = sum(parts.values())
    return Handover(tuple((d, part / whole) for d, part in parts.items()), fleet, adds)


def _port(fleet: Fleet, link: Link, device: str) -> tuple[str, ...]:
    host = fleet.device(device).host
    if link.bus:
        return (link.bus, host)
    return (device,) if link.a == link.b or device in (link.a, link.b) else (host,)


def units_of(
    owners: Sequence[Ownership], num_bytes: Mapping[str, int], limit: float = BUCKET_BYTES
) -> tuple[tuple[Ownership, ...], ...]:
    """The owned layers by unit: what travels, is gathered and let go together.

    Consecutive layers with the same parts are one unit, which closes before it would pass `limit` bytes; one
    larger than that is a unit alone, one without bytes in none. `owners` come in the model's order. Example:
    layers of 3, 4, 2 and 9 bytes with equal parts, limit 8: (3, 4), (2), (9).
    """
    units: list[list[Ownership]] = []
    filled = 0.0
    for owner in owners:
        size = num_bytes.get(owner.layer, 0)
        if not size:
            continue
        alike = units and (units[-1][-1].parts, units[-1][-1].held) == (owner.parts, owner.held)
        if not alike or filled + size > limit:
            units.append([])
            filled = 0.0
        units[-1].append(owner)
        filled += size
    return tuple(map(tuple, units))
