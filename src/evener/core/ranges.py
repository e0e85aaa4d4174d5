"""Half-open ranges of whole numbers, such as samples of a global batch: (0, 5) is 0, 1, 2, 3, 4."""

from collections.abc import Iterable, Sequence

Ranges = tuple[tuple[int, int], ...]


def count(ranges: Iterable[tuple[int, int]]) -> int:
    """How many numbers are in `ranges`. Example: ((0, 5), (8, 10)): 7."""
    return sum(stop - first for first, stop in ranges)


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """`ranges` in order, without empty ones, those that touch made one.

    ValueError where two have a number in common. Example: ((5, 8), (0, 5), (9, 9)): ((0, 8),).
    """
    found: list[tuple[int, int]] = []
    for first, stop in sorted(r for r in ranges if r[0] < r[1]):
        if found and first < found[-1][1]:
            raise ValueError(f"{first} is in two ranges")
        if found and first == found[-1][1]:
            first = found.pop()[0]
        found.append((first, stop))
    return tuple(found)


def gaps(ranges: Iterable[tuple[int, int]], stop: int) -> Ranges:
    """What `ranges` leave of 0..stop. Example: ((2, 5),) of 8: ((0, 2), (5, 8))."""
    edges = [0, *(edge for r in joined(ranges) for edge in r), stop]
    return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)


def dealt(ranges: Iterable[tuple[int, int]], parts: Sequence[int]) -> tuple[Ranges, ...]:
    """`ranges` in order, so many numbers to each of `parts`, which add up to all.

    Example: ((0, 2), (5, 8)) in 3 and 2: ((0, 2), (5, 6)) and ((6, 8),).
    """
    left, found = list(reversed(list(ranges))), []
    for part in parts:
        mine: list[tuple[int, int]] = []
        while part:
            first, stop = left.pop()
            until = min(stop, first + part)
            mine.append((first, until))
            part -= until - first
            if until < stop:
                left.append((until, stop))
        found.append(tuple(mine))
    return tuple(found)


def cut(ranges: Iterable[tuple[int, int]], limit: int) -> Ranges:
    """`ranges` in pieces of at most `limit` numbers. Example: ((0, 5),) by 2: ((0, 2), (2, 4), (4, 5))."""
    return tuple((at, min(at + limit, stop)) for first, stop in ranges for at in range(first, stop, limit))
