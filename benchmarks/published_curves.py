"""Curves from published rates: positive and non-decreasing from the first byte to any size."""

from collections.abc import Iterable

from evener.core.figures import Curve, Source


def curve_of_rates(
    rates: Iterable[tuple[float, float]], *, peak_bytes_per_s: float | None = None, source: Source = "table"
) -> Curve:
    """Seconds by message size from (bytes, bytes/s) pairs, as a fit to bandwidths gives them.

    A fit may turn wrong or negative at its ends. Points before the first positive rate are dropped: smaller
    messages take as long as the smallest left. A rate never falls with size and never exceeds the peak;
    seconds never fall. ValueError when no rate is positive. Example: (1e6, -1), (2e6, 1e9), (4e6, 5e8) with
    a peak of 8e8: 2.5 ms up to 2 MB, 5 ms at 4 MB.
    """
    points: list[tuple[float, float]] = []
    best = 0.0
    for num_bytes, rate in sorted(rates):
        if not points and not rate > 0:
            continue
        best = max(best, rate)
        usable = min(best, peak_bytes_per_s or best)
        points.append((num_bytes, max(num_bytes / usable, points[-1][1] if points else 0.0)))
    if not points:
        raise ValueError("a curve needs at least one positive rate")
    return Curve(points=tuple(points), source=source)


def slower_of(a: Curve, b: Curve) -> Curve:
    """At each size the longer of two curves, on the sizes of both. Example: what both directions allow."""
    sizes = sorted({size for curve in (a, b) for size, _ in curve.points})
    return Curve(points=tuple((n, max(a.seconds(n), b.seconds(n))) for n in sizes), source=a.source)
