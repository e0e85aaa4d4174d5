"""Whole numbers from ratios: how samples are shared out so that the parts sum exactly."""

import itertools
from collections.abc import Sequence


def apportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Split `total` in whole parts as near to `weights` as whole numbers allow (largest remainder).

    Ties go to the earlier part. Example: apportion(16, (1, 1, 1)) = (6, 5, 5); apportion(10, (5, 3, 2)) =
    (5, 3, 2). Raises ValueError for negative weights or weights that are all 0.
    """
    whole = sum(weights)
    if total < 0 or not whole > 0 or min(weights) < 0:
        raise ValueError(f"cannot share {total} by weights {tuple(weights)}")
    exact = [total * w / whole for w in weights]
    parts = [int(x) for x in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return tuple(parts)


def spans_of(parts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Half-open ranges laid end to end. Example: (5, 3, 2) gives ((0, 5), (5, 8), (8, 10))."""
    edges = [0]
    for part in parts:
        edges.append(edges[-1] + part)
    return tuple(itertools.pairwise(edges))
