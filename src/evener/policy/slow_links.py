"""A link that carries much less than the plan counts on: named, with what sums take over it now."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from evener.core.figures import Curve
from evener.core.fleet import Fleet, Link
from evener.cost.exchange import choose_way

TIMES = 3.0
"""So many times slower than the fleet says, twice in a row: less is noise, or a link shared for a moment."""
_TYPICAL_BYTES = 1e6


@dataclass(kw_only=True)
class LinkWatch:
    """What one device sees of its links, step by step; each slow one is told once.

    `devices` sum `buffers` (bytes each) a step over `fleet`; `compress` is what may be used between hosts.
    """

    fleet: Fleet
    devices: tuple[str, ...]
    buffers: Sequence[float]
    compress: Sequence[str] = ()
    _suspects: set[frozenset[str]] = field(default_factory=set)
    _told: set[frozenset[str]] = field(default_factory=set)

    def after_step(self, here: str, rates: dict[str, float]) -> list[str]:
        """Sentences on links of `here` that were slow in this step and the one before.

        `rates` are bytes/s by the device at the other end. Example: 1.25 MB/s where the fleet has 12.5.
        """
        found, slow = [], set()
        for peer, seen in rates.items():
            link = self.fleet.link(here, peer)
            if link is None:
                continue
            expected = _TYPICAL_BYTES / link.curve.seconds(_TYPICAL_BYTES)
            ends = frozenset((self.fleet.device(here).host, self.fleet.device(peer).host))
            if seen * TIMES > expected:
                continue
            slow.add(ends)
            if ends in self._suspects and ends not in self._told:
                self._told.add(ends)
                found.append(self._sentence(link, expected / seen, seen, expected))
        self._suspects = slow
        return found

    def _sentence(self, link: Link, times: float, seen: float, expected: float) -> str:
        slower = tuple(
            replace(x, curve=_slower(x.curve, times)) if {x.a, x.b} == {link.a, link.b} else x
            for x in self.fleet.links
        )
        known = replace(self.fleet, sums=())  # they were tried on the link as it was
        now = replace(known, links=slower)
        before = choose_way(known, self.devices, self.buffers, compress=self.compress)
        after = choose_way(now, self.devices, self.buffers, compress=self.compress)
        return (
            f"the link between {link.a} and {link.b} carries {_rate(seen)}, 1/{times:.0f} of the "
            f"{_rate(expected)} that the plan counts on: the sums of a step take "
            f"{after.seconds[before.way.name]:.3g} s there instead of {before.seconds[before.way.name]:.3g}, "
            f"{after.seconds[after.way.name]:.3g} s at best ({after.way.name}); the plan stays: evener plan "
            "with that rate says whether the host still pays"
        )


def _slower(curve: Curve, times: float) -> Curve:
    """The curve of a link that takes so many times its seconds. Example: 80 ms for 1 MB become 0.8 s."""
    return replace(curve, points=tuple((b, s * times) for b, s in curve.points))


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.3g} MB/s"
