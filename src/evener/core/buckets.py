"""Gradient buckets: which gradients travel together. The planner prices them, the runtime fills them.

chain order   p0 p1 p2 p3 p4        backward finishes p4 first
buckets       [4 3] [2 1] [0]       each closes before it would pass the limit
"""

from collections.abc import Sequence

BUCKET_BYTES = 8 * 2**20


def fill_buckets(sizes: Sequence[int], limit: float = BUCKET_BYTES) -> list[list[int]]:
    """Indices of `sizes` (bytes, chain order) by bucket, in the order in which backward fills them.

    A bucket closes when the next size would pass `limit` bytes; one larger than the limit travels alone.
    Example: fill_buckets((6, 1, 4, 4, 4), limit=8) = [[4, 3], [2, 1], [0]].
    """
    if limit < 1:
        raise ValueError(f"limit must be 1 byte or more, got {limit}")
    buckets: list[list[int]] = []
    room = -1.0
    for i in reversed(range(len(sizes))):
        if sizes[i] > room:
            buckets.append([])
            room = limit
        buckets[-1].append(i)
        room -= sizes[i]
    return buckets
