"""Numbers from hardware: each carries where it came from and how far it scattered."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal

import msgspec

Source = Literal["measured", "fitted", "table", "assumed"]

_LONGEST_S = 1e6  # that the shortest message may take, a million times slower in a rehearsal


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all structures: frozen, keyword-only, and strict about unknown fields in files."""


class Figure(Value, frozen=True, kw_only=True):
    """One positive number with its source.

    `spread` is relative: half the distance between the quartiles over the median, wider where it must cover
    a second measurement, as in a probe; 0 when unknown.
    Example: Figure(value=8e9, source="measured", spread=0.02) is 8 GFLOP/s, give or take 2 %.
    """

    value: float
    source: Source
    spread: float = 0.0
    note: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.value < float("inf"):
            raise ValueError(f"value must be positive and finite, got {self.value}")
        if not 0 <= self.spread < float("inf"):
            raise ValueError(f"spread must be 0 or more, got {self.spread}")


class Curve(Value, frozen=True, kw_only=True):
    """Seconds as a function of bytes: straight lines between points, non-decreasing.

    Beyond the last point the last slope goes on; below the first point its seconds hold.
    Example: points ((0, 0.001), (1e6, 0.011)) give seconds(5e5) = 0.006 and seconds(2e6) = 0.021.
    """

    points: tuple[tuple[float, float], ...]
    source: Source
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a curve needs at least one point [bytes, seconds]")
        for (b0, s0), (b1, s1) in zip(self.points, self.points[1:], strict=False):
            if b1 <= b0 or s1 < s0:
                raise ValueError(
                    f"points must rise: [{b0}, {s0}] is followed by [{b1}, {s1}]; bytes must grow "
                    "and seconds must not fall"
                )
        if self.points[0][0] < 0 or self.points[0][1] <= 0:
            raise ValueError(f"bytes must be 0 or more and seconds positive, got {self.points[0]}")
        if self.points[0][1] > _LONGEST_S:
            raise ValueError(f"{self.points[0][1]:.3g} s for the least bytes: at most {_LONGEST_S:g} s")
        if not self.points[-1][1] < float("inf") or not self.points[-1][0] < float("inf"):
            raise ValueError(f"bytes and seconds must be finite, got {self.points[-1]}")

    def seconds(self, num_bytes: float) -> float:
        """Seconds to move `num_bytes` bytes."""
        points = self.points
        if len(points) == 1 or num_bytes <= points[0][0]:
            return points[0][1]
        i = min(bisect_left(points, (num_bytes, 0.0)), len(points) - 1)
        (b0, s0), (b1, s1) = points[i - 1], points[i]
        return s0 + (num_bytes - b0) * (s1 - s0) / (b1 - b0)


def line(latency_s: float, bytes_per_s: float, source: Source = "assumed") -> Curve:
    """The curve latency + bytes/rate. Example: line(1e-3, 1e9).seconds(1e6) = 0.002."""
    return Curve(points=((0.0, latency_s), (1e9, latency_s + 1e9 / bytes_per_s)), source=source)


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; one sample is all three.

    Example: 9, 10 and 12 have 9.5, 10 and 11.
    """
    from statistics import quantiles  # 10 ms to load, which most who need figures can do without

    if len(samples) == 1:
        return (samples[0],) * 3
    lower, middle, upper = quantiles(samples, n=4, method="inclusive")
    return lower, middle, upper
