"""How long a sum over several devices takes: one formula for the cost model and for the paced wire."""

from collections import Counter
from collections.abc import Sequence

from evener.core.figures import Curve
from evener.core.fleet import Fleet, Link


def all_reduce_seconds(num_bytes: float, hops: Sequence[Curve | None]) -> float:
    """Seconds to sum `num_bytes` bytes over a ring whose hops have these curves, one a member.

        seconds = 2 (n - 1) · max over hops of curve(num_bytes / n)

    In each of 2 (n - 1) rounds every member passes one n-th on, and all wait for the slowest hop (Patarasuk
    and Yuan 2009, Bandwidth optimal all-reduce). None is a hop without a curve and costs nothing; one member
    has nobody to wait for. Example: 8 MB over four hops of 1 ms + bytes / 1 GB/s: 6 · (1 ms + 2 ms) = 18 ms.
    """
    n = len(hops)
    if n < 2:
        return 0.0
    return 2 * (n - 1) * max(0.0 if curve is None else curve.seconds(num_bytes / n) for curve in hops)


def ring(fleet: Fleet, devices: Sequence[str], *, lanes: int = 1) -> tuple[Curve | None, ...]:
    """The curves of the hops of a ring over `devices`, hosts kept together; None where no link is known.

    A link that was measured in reductions counts with that curve, any other with its curve for messages.
    Hops that cross the same bus in the same direction at once share its rate: k of them see the bytes of
    their curves divided by k, and `lanes` rings of equal members that run at once count as so many times
    the hops. Two members use their one link both ways: two hops. Example: four devices on a host whose own
    link names a bus of 4 GB/s pass 1 GB/s each.
    """
    order = ring_order(fleet, devices)
    if len(order) < 2:
        return (None,) * len(order)
    pairs = list(zip(order, order[1:] + order[:1], strict=True))
    links = [fleet.link(a, b) for a, b in pairs]
    ways = [_way(fleet, link, a, b) for link, (a, b) in zip(links, pairs, strict=True)]
    crossing = Counter(ways)
    return tuple(
        None
        if link is None
        else slowed(link.reduce_curve or link.curve, crossing[way] * lanes if link.bus else 1)
        for link, way in zip(links, ways, strict=True)
    )


def ring_order(fleet: Fleet, devices: Sequence[str]) -> list[str]:
    """`devices` in the order of a ring that keeps hosts together; the last one closes it to the first."""
    hosts: dict[str, int] = {}
    for name in devices:
        hosts.setdefault(fleet.device(name).host, len(hosts))
    return sorted(devices, key=lambda name: hosts[fleet.device(name).host])


def _way(fleet: Fleet, link: Link | None, a: str, b: str) -> tuple[str | None, str, str]:
    return (link.bus if link else None, fleet.device(a).host, fleet.device(b).host)


def slowed(curve: Curve, sharers: int) -> Curve:
    """The curve of each of `sharers` messages that share a link. Example: two see half its rate."""
    points = tuple((num_bytes / sharers, seconds) for num_bytes, seconds in curve.points)
    return Curve(points=points, source=curve.source, spread=curve.spread)
