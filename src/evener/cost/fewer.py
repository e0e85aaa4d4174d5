"""Bytes between hosts, and seconds of a step where hosts exchange less often than once a step."""

from msgspec.structs import replace

from evener.core.exchange import PIECE_BYTES, Exchange
from evener.core.exchange_seconds import packing_of
from evener.core.fewer import Fewer
from evener.core.figures import Curve
from evener.core.fleet import Fleet, Link

BUFFERS = {"local": 3, "delayed": 5}
"""Copies of the model in float32 that a device keeps in host memory where hosts take steps by themselves:
anchor, momentum and change; of a delayed exchange two parts with their sums, and what came late."""


def bytes_between(num_bytes: float, exchange: Exchange) -> float:
    """Bytes between groups of one exchange of `num_bytes` bytes of float32: all lanes, all ways.

    Each of the n members of a lane sends the others what they add up, and tells them its sum:
    2 (n - 1) of the lane's bytes in all, packed slice by slice of each piece. Example: 20 MB over 2 hosts are
    40 MB, 10.2 MB as int8, 0.64 MB as 4 columns of PowerSGD.
    """
    whole = sum(lane.part for lane in exchange.lanes)
    pieces = max(1, -(-int(num_bytes) // PIECE_BYTES))
    return sum(
        2
        * (len(lane.devices) - 1)
        * pieces
        * packing_of(lane.compression).on_wire(num_bytes / pieces * lane.part / whole * adds / sum(lane.adds))
        for lane in exchange.lanes
        for adds in lane.adds
    )


def apart_seconds(fewer: Fewer, local_s: float, exchange_s: float) -> float:
    """Seconds a step of hosts that take steps by themselves, each in `local_s` or less.

        delayed   max(local_s, exchange_s)          the exchange goes on beside the next step
        local     local_s + exchange_s / every      it is waited for once in so many steps

    Example: 1 s a step and 8 s an exchange: delayed 8 s, local:16 1.5 s.
    """
    if fewer.how == "delayed":
        return max(local_s, exchange_s)
    assert fewer.how == "local" and fewer.every
    return local_s + exchange_s / fewer.every


def with_links_times(fleet: Fleet, factor: float) -> Fleet:
    """The fleet with `factor` times the seconds of every link between hosts.

    What a split is looked for with, where an exchange counts for so much less: once in 16 steps is a link 16
    times as fast.
    """
    hosts = {d.name: d.host for d in (*fleet.devices, *fleet.hosts)}

    def of(link: Link) -> Link:
        if hosts.get(link.a, link.a) == hosts.get(link.b, link.b):
            return link
        return replace(link, curve=_times(link, factor), reduce_curve=None)

    return with_links(fleet, tuple(of(link) for link in fleet.links))


def with_links(fleet: Fleet, links: tuple[Link, ...]) -> Fleet:
    """The fleet with other links; sums that were tried on those it had say nothing of these."""
    return replace(fleet, links=links, sums=())


def _times(link: Link, factor: float) -> Curve:
    points = tuple((num_bytes, seconds * factor) for num_bytes, seconds in link.curve.points)
    return replace(link.curve, points=points)
