"""One fleet from the fleets of several hosts. What no file tells, the links between them, stays unknown."""

from collections.abc import Mapping, Sequence
from itertools import combinations

from msgspec.structs import replace

from evener.core.figures import Figure
from evener.core.fleet import Device, Fleet, Link
from evener.errors import UsageError


def merge(fleets: Mapping[str, Fleet], between: Sequence[Link] = (), problems: Sequence[str] = ()) -> Fleet:
    """The devices and links of all `fleets` (by the file or host that told them), and the links `between`.

    Buses that two fleets call alike stay apart. The note keeps each fleet's own and the `problems`, and says
    which hosts have no link between them and which devices share a kind but not its numbers. Raises
    UsageError where two fleets have a device of one name. Example: lab1 and lab2 merge to their devices,
    each host's links, and "links between lab1 and lab2 are unknown".
    """
    told: dict[str, str] = {}
    for source, fleet in fleets.items():
        for device in fleet.devices:
            if device.name in told:
                raise UsageError(
                    f"both {told[device.name]} and {source} have a device {device.name}",
                    remedy="a name for each host: evener probe --host lab2 -o lab2.json",
                )
            told[device.name] = source
    used: dict[str, str] = {}
    links = [_apart(x, source, used) for source, fleet in fleets.items() for x in fleet.links]
    links += between
    merged = Fleet(
        devices=tuple(d for f in fleets.values() for d in f.devices),
        links=tuple(links),
    )
    notes = [*(f"{source}: {f.note}" for source, f in fleets.items() if f.note), *problems]
    return replace(merged, note="; ".join([*notes, *unlinked(merged), *apart(merged)]))


def unlinked(fleet: Fleet) -> list[str]:
    """A sentence for each pair of hosts without a link; a plan in which they have to talk is refused."""
    hosts = sorted({d.host for d in fleet.devices})
    ends = {frozenset((link.a.partition("/")[0], link.b.partition("/")[0])) for link in fleet.links}
    return [
        f"links between {a} and {b} are unknown until they are measured (evener probe --join) or named"
        for a, b in combinations(hosts, 2)
        if frozenset((a, b)) not in ends
    ]


def apart(fleet: Fleet) -> list[str]:
    """A sentence for each device whose numbers are further from another's of its kind than spreads explain.

    Profiles are kept by kind. Two figures agree where value · (1 ± spread) of both overlap. Example: 8e9 and
    2e9 FLOP/s with 5 % each do not, 8e9 and 8.3e9 do.
    """
    first: dict[str, Device] = {}
    said = []
    for device in fleet.devices:
        other = first.setdefault(device.kind, device)
        ours, theirs = _figures(other), _figures(device)
        far = [n for n in ours if n in theirs and not _overlap(ours[n], theirs[n])]
        if far:
            told = ", ".join(f"{n} {ours[n].value:.3g} and {theirs[n].value:.3g}" for n in far)
            said.append(
                f"{other.name} and {device.name} are both of kind {device.kind!r} and differ: {told}; give "
                "one another kind, or measure again when both are idle"
            )
    return said


def _figures(device: Device) -> dict[str, Figure]:
    named = {f"flops {name}": figure for name, figure in device.flops.items()}
    others = {"bytes_per_s": device.bytes_per_s, "launch_s": device.launch_s}
    return named | {name: figure for name, figure in others.items() if figure is not None}


def _overlap(a: Figure, b: Figure) -> bool:
    low, high = sorted((a, b), key=lambda f: f.value)
    return low.value * (1 + low.spread) >= high.value * (1 - high.spread)


def _apart(link: Link, source: str, used: dict[str, str]) -> Link:
    """`link` with a bus that no other fleet has; `used` tells whose each name is."""
    if link.bus is None or used.setdefault(link.bus, source) == source:
        return link
    return replace(link, bus=f"{link.a.partition('/')[0]}:{link.bus}")
