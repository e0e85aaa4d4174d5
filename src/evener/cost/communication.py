"""Seconds of messages and collectives over the links of a fleet."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from evener.core.collectives import all_reduce_seconds, ring
from evener.core.figures import Curve
from evener.core.fleet import Fleet

Group = str | tuple[str, ...]
"""A device, or the devices of a tensor-parallel group."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links of a fleet with the rings over them remembered.

    A pair without a link costs nothing; `missing` then holds the pair, so that a plan can say what it
    assumed.
    """

    fleet: Fleet
    missing: set[tuple[str, str]] = field(default_factory=set)
    _rings: dict[tuple[tuple[str, ...], int], tuple[Curve | None, ...]] = field(default_factory=dict)
    _hosts: dict[tuple[str, ...], tuple[tuple[str, ...], ...]] = field(default_factory=dict)

    def curve(self, a: str, b: str) -> Curve | None:
        link = self.fleet.link(a, b)
        if link is None:
            self.missing.add((a, b))
            return None
        return link.curve

    def send_s(self, a: str, b: str, num_bytes: float) -> float:
        """Seconds of one message; 0 between a device and itself. Example: 1 MB at 1 ms + 1 GB/s: 2 ms."""
        if a == b or num_bytes <= 0:
            return 0.0
        curve = self.curve(a, b)
        return 0.0 if curve is None else curve.seconds(num_bytes)

    def group_send_s(self, sender: Group, receiver: Group, num_bytes: float) -> float:
        """Seconds until every device of `receiver` has the message, each device of `sender` serving in turn.

        Both ways count, so the larger group sets the number of copies. On a bus they share its rate; without
        one each sender's copies follow one another. Example: 1 MB from 2 devices to 4 at 1 GB/s: 2 ms, on a
        bus 4 ms.
        """
        senders, receivers = _members(sender), _members(receiver)
        copies = max(len(senders), len(receivers))
        link = self.fleet.link(senders[0], receivers[0]) if senders != receivers else None
        if link is not None and link.bus:
            return self.send_s(senders[0], receivers[0], copies * num_bytes)
        each = -(-copies // min(len(senders), len(receivers)))
        return each * self.send_s(senders[0], receivers[0], num_bytes)

    def hops(self, names: tuple[str, ...], lanes: int = 1) -> tuple[Curve | None, ...]:
        if (names, lanes) not in self._rings:
            self._rings[names, lanes] = ring(self.fleet, names, lanes=lanes)
            if len(names) > 1 and None in self._rings[names, lanes]:
                self.missing.add((names[0], names[1]))
        return self._rings[names, lanes]

    def all_reduce_s(self, names: tuple[str, ...], num_bytes: float, lanes: int = 1) -> float:
        """The faster of one ring over all and the two levels of `two_level_all_reduce_s`.

        `lanes` sums of equal members run at once: each device of tensor-parallel groups sums its own part.
        """
        return min(
            self.flat_all_reduce_s(names, num_bytes, lanes),
            self.two_level_all_reduce_s(names, num_bytes, lanes),
        )

    def flat_all_reduce_s(self, names: tuple[str, ...], num_bytes: float, lanes: int = 1) -> float:
        """One ring over all members; see `all_reduce_seconds`."""
        return all_reduce_seconds(num_bytes, self.hops(names, lanes))

    def two_level_all_reduce_s(self, names: tuple[str, ...], num_bytes: float, lanes: int = 1) -> float:
        """Inside each host at once, then one member of each host in a ring, handed on inside at the end.

            seconds = max over hosts of ring(inside) + ring(between, all bytes)

        The inner ring's two halves, sum and hand on, stand before and after the outer one. One host or one
        member a host leave one level. Example: 2 hosts of 2, inside 1 ms, between 10 ms a round at any
        size: 2 + 20 ms.
        """
        if names not in self._hosts:
            groups: dict[str, list[str]] = {}
            for name in names:
                groups.setdefault(name.partition("/")[0], []).append(name)
            self._hosts[names] = tuple(tuple(g) for g in groups.values())
        groups_held = self._hosts[names]
        inside = max(all_reduce_seconds(num_bytes, self.hops(g, lanes)) for g in groups_held)
        leaders = tuple(g[0] for g in groups_held)
        return inside + all_reduce_seconds(num_bytes, self.hops(leaders, lanes))


def _members(group: Group) -> tuple[str, ...]:
    return (group,) if isinstance(group, str) else group


def shares_send_s(
    network: Network,
    senders: Sequence[tuple[Group, int]],
    receivers: Sequence[tuple[Group, int]],
    sample_bytes: float,
) -> float:
    """Seconds until all receivers have their samples of a micro-batch, both sides cut by samples in order.

    A sender serves one message after another, senders work at once. Example: one sender, two receivers of 1
    MB each over 1 ms + 1 GB/s: 4 ms.
    """
    worst, start = 0.0, 0
    for sender, count in senders:
        spent, first = 0.0, 0
        for receiver, wanted in receivers:
            overlap = min(start + count, first + wanted) - max(start, first)
            if overlap > 0:
                spent += network.group_send_s(sender, receiver, overlap * sample_bytes)
            first += wanted
        worst, start = max(worst, spent), start + count
    return worst
