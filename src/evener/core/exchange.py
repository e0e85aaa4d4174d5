"""How a sum goes over groups: inside each, between them by lanes, and spread inside again.

    a: a/0 a/1 ──┐ lane 0: a/0 ═══ b/0   half of every piece      1. inside: a/0 has half 0 of a, a/1 half 1
    b: b/0 b/1 ──┘ lane 1: a/1 ═══ b/1   the other half           2. lanes: each half over both hosts
                                                                  3. inside: both halves to both members

A plan says it in reductions: those without a `part` are groups, those with one are lanes of one member a
group. One group of all devices is a single sum without lanes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as replaced

from evener.core.plan import Plan, Reduction
from evener.core.split import apportion, spans_of
from evener.errors import PlanMismatchError

PIECE_BYTES = 2**21
"""A buffer travels in pieces of at most so many bytes: while one is between hosts, the next is inside."""
LOSSLESS = "lossless"
"""The compression that keeps all bits, so that nobody has to allow it."""
ROW = 256
"""Cuts are at multiples of so many values, a block of `runtime/compression/blocks.py`.

Where slices end within a block, int8 took 230 ms of processors for 20.0 MB and 208 for 21.0 (docs/log.md).
"""
TRACKS = 2
"""So many sets of stages work on a buffer's pieces at once: a link has something to carry while one waits."""
Span = tuple[int, int]


@dataclass(frozen=True)
class Lane:
    """One member of each group, in the order of groups; `part` of all values, `adds` by member.

    `adds` is the part of these values that each member adds up for the others.
    """

    devices: tuple[str, ...]
    part: float
    adds: tuple[float, ...]
    transport: str = "gloo"
    compression: str | None = None

    @property
    def loses(self) -> bool:
        """Whether less than all bits of a value go over it."""
        return loses(self.compression)


def loses(compression: str | None) -> bool:
    """Whether a lane with this compression sends less than all bits. Example: "int8" does, "lossless" not."""
    return compression not in (None, LOSSLESS)


def said_of(compression: str | None) -> str:
    """What a plan's words add for a lane. Examples: None is "", "int8" ", compressed by int8"."""
    if compression is None:
        return ""
    return f", compressed by {compression}" if loses(compression) else ", packed without loss"


@dataclass(frozen=True)
class Exchange:
    """Groups whose members are close, in order, and the lanes between them.

    `ordered` are all devices in the order of their processes.
    """

    groups: tuple[tuple[str, ...], ...]
    lanes: tuple[Lane, ...]
    transports: tuple[str, ...] = ()
    ordered: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices, group by group."""
        return tuple(name for group in self.groups for name in group)

    @property
    def loses(self) -> bool:
        """Whether any lane sends less than all bits."""
        return any(lane.loses for lane in self.lanes)

    @property
    def spelled(self) -> str:
        """Groups, and lanes with part, what each member adds and compression: alike for the same exchange.

        Example: "a/0+a/1 b/0 by a/0+b/0 1.000 (0.500 0.500)".
        """
        whole = sum(lane.part for lane in self.lanes)
        lanes = []
        for lane in self.lanes:
            adds = " ".join(f"{x / sum(lane.adds):.3f}" for x in lane.adds)
            by = f" {lane.compression}" if lane.compression else ""
            lanes.append(f"{'+'.join(lane.devices)} {lane.part / whole:.3f} ({adds}){by}")
        return f"{' '.join('+'.join(g) for g in self.groups)} by {', '.join(lanes)}"

    def group_of(self, device: str) -> tuple[str, ...]:
        """The members of the group that `device` is in."""
        return next(g for g in self.groups if device in g)

    def owners(self, device: str) -> tuple[str, ...]:
        """By lane, the member of `device`'s group that is in it."""
        members = set(self.group_of(device))
        return tuple(next(d for d in lane.devices if d in members) for lane in self.lanes)

    def lane_spans(self, count: int) -> tuple[Span, ...]:
        """Which of `count` values each lane carries. Example: parts 0.75 and 0.25 of 8: (0, 6), (6, 8)."""
        return spans_of(_cut(count, [lane.part for lane in self.lanes]))

    def sizes(self, num_values: int, item_bytes: int) -> tuple[int, ...]:
        """Values of each piece of a buffer: nearly equal ones of at most `PIECE_BYTES`.

        Example: 3 MiB of float32 are two pieces of 393,216 values.
        """
        number = max(1, -(-num_values * item_bytes // PIECE_BYTES))
        return _cut(num_values, [1.0] * number)


def adds_spans(lane: Lane, count: int) -> tuple[Span, ...]:
    """Which of a lane's `count` values each of its members adds up."""
    return spans_of(_cut(count, lane.adds))


def _cut(count: int, parts: Sequence[float]) -> tuple[int, ...]:
    """Of `count` values so many for each part: whole rows where there are many, the rest with the last.

    Example: 5,000,000 in two equal parts: 9,766 rows, then 9,765 and 64 values. A part of 0 gets none.
    """
    row = ROW if count >= ROW * ROW else 1
    sizes = [row * rows for rows in apportion(count // row, parts)]
    sizes[max(i for i, part in enumerate(parts) if part)] += count % row
    return tuple(sizes)


def goes_round(lane: Lane) -> bool:
    """Whether the members of a lane pass slices round a ring: three or more that add up alike."""
    return len(lane.devices) > 2 and len(set(lane.adds)) == 1


def reductions_of(plan: Plan, devices: Sequence[str]) -> tuple[Reduction, ...]:
    """What `plan` says of the sum over just these devices, in any order: the holders of some layers.

    Example: of a reduction that is among a/0 and b/0, what is asked for b/0 and a/0.
    """
    wanted, everyone = frozenset(devices), frozenset(plan.devices)
    return tuple(r for r in plan.reductions if (frozenset(r.among) or everyone) == wanted)


def without(reductions: Sequence[Reduction], lost: str) -> tuple[Reduction, ...]:
    """The groups and lanes of all devices of a plan when `lost` is no longer one of them.

    Where it was in a lane another member of its group takes its place; with the last of a group the lanes
    go by it. Nothing is left where one group is, and of sums among holders of some layers. Example: groups
    (a/0, a/1), (b/0) and the lane (a/0, b/0) without a/0: the lane (a/1, b/0).
    """
    groups = [r for r in reductions if r.part is None]
    others = [d for r in groups if lost in r.devices for d in r.devices if d != lost]
    found = [replaced(r, devices=tuple(d for d in r.devices if d != lost)) for r in groups]
    found = [r for r in found if len(r.devices) > 1]
    for lane in (r for r in reductions if r.part is not None):
        stands_in = {lost: others[0]} if others else {}
        kept = [d for d in lane.devices if d != lost or others]
        if len(kept) < 2:
            return ()
        adds = {stands_in.get(d, d): lane.adds[d] for d in kept if d in lane.adds}
        if lane.adds and not sum(adds.values()):
            adds = {}
        found.append(replaced(lane, devices=tuple(stands_in.get(d, d) for d in kept), adds=adds))
    return () if any(r.among for r in found) else tuple(found)


def exchange_of(reductions: Sequence[Reduction], devices: Sequence[str]) -> Exchange | None:
    """The exchange that a plan's reductions ask for among `devices`; None for one sum over all of them.

    `devices` are in the order of their processes.
    Groups of one are not written down. PlanMismatchError where groups overlap, a lane has not exactly one
    member of each group, or parts are no shares of a whole. Example: none, or one of all devices: None.
    """
    lanes = [r for r in reductions if r.part is not None]
    if not lanes:
        return None
    wanted = [r for r in reductions if r.part is None and len(r.devices) > 1]
    inside = {d: r for r in wanted for d in r.devices}
    if len(inside) != sum(len(r.devices) for r in wanted):
        raise _wrong("two of its groups hold the same device", reductions)
    groups: dict[tuple[str, ...], str] = {}
    for name in devices:
        one = inside.get(name)
        groups.setdefault(one.devices if one else (name,), one.transport if one else "")
    found = Exchange(
        groups=tuple(groups),
        lanes=tuple(_lane(r) for r in lanes),
        transports=tuple(groups.values()),
        ordered=tuple(devices),
    )
    if set(found.devices) != set(devices):
        raise _wrong(f"its groups hold {', '.join(found.devices)}, not {', '.join(devices)}", reductions)
    for lane in found.lanes:
        if [sum(d in group for d in lane.devices) for group in found.groups] != [1] * len(found.groups):
            raise _wrong(f"the lane {', '.join(lane.devices)} has not one member of each group", reductions)
    if len(found.groups) < 2:
        raise _wrong("its lanes lead nowhere: there is one group", reductions)
    if not 0 < sum(lane.part for lane in found.lanes) < float("inf"):
        raise _wrong("the parts of its lanes sum to nothing", reductions)
    return _in_order(found)


def _lane(reduction: Reduction) -> Lane:
    assert reduction.part is not None
    adds = tuple(reduction.adds.get(d, 0.0 if reduction.adds else 1.0) for d in reduction.devices)
    if reduction.part < 0 or min(adds) < 0 or not sum(adds) > 0:
        raise _wrong(f"the parts of {', '.join(reduction.devices)} are below 0 or all 0", [reduction])
    return Lane(
        devices=reduction.devices,
        part=reduction.part,
        adds=adds,
        transport=reduction.transport,
        compression=reduction.compression,
    )


def _in_order(found: Exchange) -> Exchange:
    """Every lane in the order of groups, which is the order of addition everywhere."""
    place = {name: i for i, group in enumerate(found.groups) for name in group}
    lanes = []
    for lane in found.lanes:
        order = sorted(range(len(lane.devices)), key=lambda i: place[lane.devices[i]])
        devices, adds = tuple(lane.devices[i] for i in order), tuple(lane.adds[i] for i in order)
        lanes.append(replace(lane, devices=devices, adds=adds))
    return replace(found, lanes=tuple(lanes))


def _wrong(what: str, reductions: Sequence[Reduction]) -> PlanMismatchError:
    told = "; ".join(f"{', '.join(r.devices)}" + (f" part {r.part:g}" if r.part else "") for r in reductions)
    return PlanMismatchError(
        f"the plan's reductions cannot be carried out: {what}",
        numbers=told,
        remedy="groups without a part that share no device, and lanes with a part and one device of each "
        "group; or no reductions at all: one sum over all",
    )
