"""Changed hardware: another link between two ends, more memory, a card in slices, slices as one card."""

from collections.abc import Sequence

from msgspec.structs import replace

from evener.core.catalogue import known_device, link_curve, with_table
from evener.core.figures import Curve
from evener.core.fleet import Device, Fleet, Link
from evener.core.profile import Profile
from evener.cost.fewer import with_links
from evener.errors import UnknownNameError, UsageError
from evener.planner.slices import card_of, chosen, slices_of
from evener.planner.slowed import slowed, times


def with_link(fleet: Fleet, a: str, b: str, kind: str) -> Fleet:
    """The fleet with a link of the catalogue's `kind` between two devices or hosts, in place of theirs.

    UnknownNameError for an end or a kind that there is not. Example: "1 Gbit/s Ethernet" between lab1 and
    lab2 becomes "10 Gbit/s Ethernet".
    """
    _check_ends(fleet, a, b)
    new = Link(a=a, b=b, kind=kind, curve=link_curve(kind, f"the link {a} - {b}"))
    return with_links(fleet, (*(x for x in fleet.links if {x.a, x.b} != {a, b}), new))


def with_faster_link(fleet: Fleet, a: str, b: str, factor: float) -> Fleet:
    """The fleet in which the link between `a` and `b` takes 1/factor of the seconds for any bytes."""
    _check_ends(fleet, a, b)
    if not any({x.a, x.b} == {a, b} for x in fleet.links):
        raise UnknownNameError(
            f"the fleet has no link {a} - {b}",
            remedy=f"one of: {', '.join(f'{x.a} {x.b}' for x in fleet.links) or 'none'}",
        )
    return with_links(fleet, tuple(faster(x, factor) if {x.a, x.b} == {a, b} else x for x in fleet.links))


def faster(link: Link, factor: float) -> Link:
    """The link with 1/factor of its seconds. Example: 9 ms for 1 MB become 4.5 ms with factor 2."""
    reduce_curve = _quicker(link.reduce_curve, factor) if link.reduce_curve else None
    return replace(link, curve=_quicker(link.curve, factor), reduce_curve=reduce_curve)


def _quicker(curve: Curve, factor: float) -> Curve:
    return replace(curve, points=tuple((b, s / factor) for b, s in curve.points))


def _check_ends(fleet: Fleet, a: str, b: str) -> None:
    ends = {d.name for d in fleet.devices} | {d.host for d in fleet.devices}
    for end in (a, b):
        if end not in ends:
            raise UnknownNameError(
                f"the fleet has no device or host {end!r}", remedy=f"one of: {', '.join(sorted(ends))}"
            )


def with_memory(fleet: Fleet, name: str, factor: float) -> Fleet:
    """The fleet in which device `name` has `factor` times the memory, and as much more of it free.

    UsageError where its memory is not known. Example: 8 GB of which 7 are free become 16 GB, 15 free.
    """
    device = fleet.device(name)
    if device.memory_bytes is None:
        raise UsageError(f"the memory of {name} is not known", remedy="memory_bytes in the fleet file")
    more = device.memory_bytes.value * (factor - 1)
    free = device.free_memory_bytes
    if free is not None:
        free = replace(free, value=max(free.value + more, 1.0))
    larger = replace(device, memory_bytes=times(device.memory_bytes, factor), free_memory_bytes=free)
    return replace(fleet, devices=tuple(larger if d.name == name else d for d in fleet.devices))


def split_card(
    fleet: Fleet, profile: Profile, name: str, slices: Sequence[str]
) -> tuple[Fleet, Profile, tuple[str, ...]]:
    """The fleet with card `name` in MIG slices, the profile that knows them, and what was assumed.

    A slice that the profile measured keeps its seconds; else it takes the card's times card rate ÷ slice
    rate. The slices share the card's own links. UsageError for slices that do not fit on the card.
    Example: 3g.20gb twice on an A100 gives two devices of 42/108 of its rate each: 2.57 times the seconds.
    """
    card = fleet.device(name)
    way = chosen(card.kind, list(slices))
    said: dict[str, None] = {}
    new: list[Device] = []
    for number, part in enumerate(way):
        device = with_table(Device(name=f"{name}-{part.name}-{number}", kind=part.kind, type=card.type))
        if part.kind not in profile.kinds and card.kind in profile.kinds:
            profile = _scaled(fleet, profile, card, part.kind, 1 / part.part)
            said[f"seconds on {part.name} are those of the whole card times {1 / part.part:.3g}"] = None
        if card.price_per_hour is not None:
            device = replace(device, price_per_hour=times(card.price_per_hour, 1 / len(way)))
        new.append(device)
    said["slices of one card talk through host memory"] = None
    devices = tuple(x for d in fleet.devices for x in (new if d.name == name else (d,)))
    links = tuple(x for link in fleet.links for x in _links_of(link, name, [d.name for d in new]))
    return replace(fleet, devices=devices, links=links, sums=()), profile, tuple(said)


def _scaled(fleet: Fleet, profile: Profile, card: Device, kind: str, factor: float) -> Profile:
    """The profile with `kind`, whose seconds are a multiple of the card's."""
    changed, wider = slowed(fleet, profile, card.name, factor)
    made = changed.device(card.name).kind
    return replace(
        wider,
        timings=tuple(replace(t, kind=kind) if t.kind == made else t for t in wider.timings),
        steps=tuple(replace(s, kind=kind) if s.kind == made else s for s in wider.steps),
    )


def _links_of(link: Link, card: str, slices: Sequence[str]) -> list[Link]:
    """A link of the card serves each of its slices, which share its rate."""
    if card not in (link.a, link.b):
        return [link]
    bus = link.bus or f"slot of {card}"
    return [
        replace(link, a=s if link.a == card else link.a, b=s if link.b == card else link.b, bus=bus)
        for s in slices
    ]


def merge_slices(fleet: Fleet, names: Sequence[str]) -> Fleet:
    """The fleet with the named slices of one card as that card, whole again.

    UsageError for devices that are no slices of one kind of card on one host. The card has its catalogue
    figures; its price is that of the slices together.
    """
    parts = [fleet.device(n) for n in names]
    cards = {card_of(d.kind) for d in parts}
    hosts = {d.host for d in parts}
    if len(cards) != 1 or None in cards or len(hosts) != 1 or len(set(names)) < len(names):
        raise UsageError(
            f"{', '.join(names)} are no slices of one card",
            numbers="; ".join(f"{d.name}: {d.kind}" for d in parts),
            remedy='devices of a kind like "NVIDIA A100-SXM4-40GB MIG 3g.20gb", on one host',
        )
    (kind,), (host,) = cards, hosts
    assert kind is not None
    whole = slices_of(kind)[0]
    counts = {s.kind: s.compute for s in slices_of(kind)}
    kinds = (known_device(d.kind) for d in parts)
    if sum(counts[k.kind] for k in kinds if k is not None) > whole.compute:
        raise UsageError(f"{', '.join(names)} are more than one card", remedy="the slices of one card")
    prices = [d.price_per_hour for d in parts]
    card = with_table(Device(name=f"{host}/whole-{names[0].partition('/')[2]}", kind=kind))
    if all(p is not None for p in prices):
        total = sum(p.value for p in prices if p is not None)
        card = replace(card, price_per_hour=replace(prices[0], value=total))  # type: ignore[type-var]
    rest = tuple(d for d in fleet.devices if d.name not in names)
    links = tuple(x for x in fleet.links if not {x.a, x.b} & set(names))
    return with_links(replace(fleet, devices=(*rest, card), links=()), links)
