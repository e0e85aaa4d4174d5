"""Whole samples per device so that the slowest device ends as early as possible: exact."""

import heapq
from bisect import bisect_right
from collections.abc import Sequence

_ROUNDS = 200


def balance(
    total: int, curves: Sequence[Sequence[float]], counts: Sequence[int], *, least: int = 0
) -> tuple[float, list[list[int]]] | None:
    """(seconds, samples of each device by class) with the smallest possible maximum of curves[c][n].

    `curves[c][n]` is non-decreasing in n, `counts[c]` the number of devices of class c, `least` the fewest
    samples each must take. None when the devices cannot take `total`. Bisection over the maximum T: class c
    can take max{n: curves[c][n] ≤ T}; the smallest T at which the sum reaches `total` is optimal. What is
    too much then is taken back from whoever ends last, so that no device works longer than it must.
    Example: balance(16, ([4.0 * n for n in range(17)], [12.0 * n for n in range(17)]), (1, 1)) = (48.0,
    [[12], [4]]).
    """
    low = max((c[least] for c in curves), default=0.0)
    ends = [_finite_end(c) for c in curves]
    if least and low == float("inf"):
        return None
    if sum(m * e for m, e in zip(counts, ends, strict=True)) < total or least * sum(counts) > total:
        return None

    def taken(limit: float) -> list[int]:
        return [max(least, bisect_right(c, limit, 0, e + 1) - 1) for c, e in zip(curves, ends, strict=True)]

    def enough(limit: float) -> bool:
        return sum(m * n for m, n in zip(counts, taken(limit), strict=True)) >= total

    high = max(c[e] for c, e in zip(curves, ends, strict=True))
    if enough(low):
        high = low
    for _ in range(_ROUNDS):
        if high - low <= 1e-13 * high:
            break
        middle = 0.5 * (low + high)
        if enough(middle):
            high = middle
        else:
            low = middle
    samples = [[n] * m for n, m in zip(taken(high), counts, strict=True)]
    _take_back(sum(map(sum, samples)) - total, samples, curves, least)
    return max((c[n] for c, row in zip(curves, samples, strict=True) for n in row), default=0.0), samples


def _finite_end(curve: Sequence[float]) -> int:
    return bisect_right(curve, 1e300) - 1


def _take_back(surplus: int, samples: list[list[int]], curves: Sequence[Sequence[float]], least: int) -> None:
    heap = [
        (-curves[c][n], -n, c, i) for c, row in enumerate(samples) for i, n in enumerate(row) if n > least
    ]
    heapq.heapify(heap)
    for _ in range(surplus):
        _, n, c, i = heapq.heappop(heap)
        samples[c][i] -= 1
        if samples[c][i] > least:
            heapq.heappush(heap, (-curves[c][-n - 1], n + 1, c, i))
