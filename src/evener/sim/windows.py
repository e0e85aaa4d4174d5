"""Spells during which a device is slow or a link is cut, and what they do to work under way."""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, kw_only=True)
class Slow:
    """`device` needs `factor` times its seconds from `start_s` to `end_s`."""

    device: str
    factor: float
    start_s: float
    end_s: float = inf


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Nothing passes between `a` and `b` (devices or hosts) from `start_s` to `end_s`."""

    a: str
    b: str
    start_s: float
    end_s: float

    def parts(self, one: str, other: str) -> bool:
        """True when devices `one` and `other` lie on different sides."""
        return (_is(one, self.a) and _is(other, self.b)) or (_is(one, self.b) and _is(other, self.a))


@dataclass(frozen=True, kw_only=True)
class Windows:
    """All spells of a run."""

    slow: tuple[Slow, ...] = ()
    cuts: tuple[Cut, ...] = ()

    def compute_end_s(self, device: str, start_s: float, seconds: float) -> float:
        """When work of `seconds` begun at `start_s` ends. Example: 2 s, 3 times slower: 6 s later."""
        spells = [(s.start_s, s.end_s, 1 / s.factor) for s in self.slow if s.device == device]
        return _end(start_s, seconds, spells)

    def transfer_end_s(self, devices: tuple[str, ...], start_s: float, seconds: float) -> float:
        """When a transfer among `devices` of `seconds` that begins at `start_s` ends."""
        return _end(start_s, seconds, [(c.start_s, c.end_s, 0.0) for c in self._cuts_among(devices)])

    def during(self, start_s: float, end_s: float) -> "Windows":
        """The spells that touch the time between the two."""
        slow = tuple(s for s in self.slow if s.start_s < end_s and s.end_s > start_s)
        return Windows(slow=slow, cuts=tuple(c for c in self.cuts if c.start_s < end_s and c.end_s > start_s))

    def cover(self, start_s: float, end_s: float) -> bool:
        """True when every spell lasts through all of the time between the two."""
        spells = [(x.start_s, x.end_s) for x in self.slow] + [(x.start_s, x.end_s) for x in self.cuts]
        return all(start <= start_s and end >= end_s for start, end in spells)

    def is_cut(self, one: str, other: str, now_s: float) -> bool:
        """True when nothing passes between the two at `now_s`."""
        return any(c.start_s <= now_s < c.end_s for c in self._cuts_among((one, other)))

    def next_change_s(self, one: str, other: str, now_s: float) -> float:
        """The next moment after `now_s` at which a cut between the two begins or ends; inf when none."""
        edges = (edge for c in self._cuts_among((one, other)) for edge in (c.start_s, c.end_s))
        return min((edge for edge in edges if edge > now_s), default=inf)

    def _cuts_among(self, devices: tuple[str, ...]) -> list[Cut]:
        pairs = [(a, b) for i, a in enumerate(devices) for b in devices[i + 1 :]] if self.cuts else []
        return [c for c in self.cuts if any(c.parts(a, b) for a, b in pairs)]


def _is(device: str, name: str) -> bool:
    return device == name or device.partition("/")[0] == name


def _end(start_s: float, seconds: float, spells: list[tuple[float, float, float]]) -> float:
    """Work through `seconds` at rate 1, times the rate of every spell (start, end, rate) that holds."""
    edges = sorted({edge for start, end, _ in spells for edge in (start, end) if start_s < edge < inf})
    now, left = start_s, seconds
    for edge in [*edges, inf]:
        rate = 1.0
        for begin, end, factor in spells:
            if begin <= now < end:
                rate *= factor
        if rate and (edge == inf or left <= (edge - now) * rate):
            return now + left / rate
        left, now = left - (edge - now) * rate, edge
    raise AssertionError("a cut ends")
