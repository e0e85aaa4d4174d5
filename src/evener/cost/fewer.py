"""Bytes between hosts, and seconds of a step where hosts exchange less often than once a step."""

from evener.core.exchange import Exchange
from evener.core.exchange_seconds import PACKINGS


def bytes_between(num_bytes: float, exchange: Exchange) -> float:
    """Bytes between groups of one exchange of `num_bytes` bytes of float32: all lanes, all ways.

    Each of the n members of a lane sends the others what they add up, and tells them its sum:
    2 (n - 1) of the lane's bytes in all. Example: 20 MB over 2 hosts are 40 MB, 10.2 MB as int8.
    """
    whole = sum(lane.part for lane in exchange.lanes)
    return sum(
        2
        * (len(lane.devices) - 1)
        * num_bytes
        * (lane.part / whole)
        * (PACKINGS[lane.compression].ratio if lane.compression else 1.0)
        for lane in exchange.lanes
    )
