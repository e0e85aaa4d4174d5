"""Bytes between hosts, and seconds of a step where hosts exchange less often than once a step."""

from msgspec.structs import replace

from evener.core.exchange import Exchange
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
    2 (n - 1) of the lane's bytes in all. Example: 20 MB over 2 hosts are 40 MB, 10.2 MB as int8.
    """
    whole = sum(lane.part for lane in exchange.lanes)
    return sum(
        2 * (len(lane.devices) - 1) * num_bytes * (lane.part / whole) * packing_of(lane.compression).ratio
        for lane in exchange.lanes
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

    return replace(fleet, links=tuple(of(link) for link in fleet.links))


def _times(link: Link, factor: float) -> Curve:
    points = tuple((num_bytes, seconds * factor) for num_bytes, seconds in link.curve.points)
    return replace(link.curve, points=points)
