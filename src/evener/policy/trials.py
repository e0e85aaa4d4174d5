"""Which ways of summing gradients are tried on a job's links before one is chosen.

What the formula of a sum does not know shows in a trial: messages that wait for one another, processes that
wait for a core. So the few ways that may be the fastest are tried, and those of them that come out nearly
alike are tried again, more often, with the time that is left.

    first look   ring   1 lane   1 lane, lossless   2 lanes   2 lanes, lossless      64 KiB, 8.4 and 16.8 MB
    again                        1 lane, lossless             2 lanes, lossless      the same, some times

Over slow links the first look is at less: 8.4 MB, or 4.2.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from evener.core.exchange import PIECE_BYTES, exchange_of
from evener.core.figures import Curve, Value, quartiles
from evener.core.fleet import Fleet, TriedSum
from evener.core.plan import Reduction
from evener.core.words import counted
from evener.cost.exchange import spelled_ring, ways_of

BUDGET_S = 30.0
FAR = 3.0
"""A way predicted to take so many times the fastest one's seconds is not tried: predictions are better."""
NEAR = 1.25
"""What took less than so many times the fastest one's seconds at the first look is tried again."""
MOST_REPEATS = 10
_LOOK = 0.6  # of the budget, at most, for the first look
_SMALL_BYTES = 2**16
_MOST = (4, 8)
_EFFORTS = ((_MOST, 2), ((4,), 2), ((4,), 1), ((2,), 1))
"""Pieces of the first look's large sizes, and how often: the most that there is time for.

A sum that keeps the processors busy has a time for each byte that grows as what it works with leaves the
caches, so 8.4 MB tell too little of 20.
"""

Samples = Sequence[Sequence[Sequence[float]]]
"""Seconds until the last device had the sum, by way, size and turn."""


class Trials(Value, frozen=True, kw_only=True):
    """The ways to try, each by what a plan says of it (none for the ring), with buffers of `sizes` bytes.

    Each size `repeats` times, before the first look once more to warm up; `budget_s` is left for it all.
    `num_bytes` are those of the gradients. `why` says what is tried and what is not.
    """

    ways: tuple[tuple[Reduction, ...], ...]
    sizes: tuple[int, ...]
    repeats: int
    num_bytes: int
    budget_s: float
    why: str


def trials_of(
    fleet: Fleet, names: tuple[str, ...], compress: Sequence[str], num_bytes: int, budget_s: float = BUDGET_S
) -> Trials:
    """The first look at sums of `num_bytes` of gradients over `names`: at most 0.6 of `budget_s` seconds.

    Nothing to try where there is one way. Example: 2 hosts of 2 at 125 MB/s, 20 MB: ring, 1 lane and 2 lanes,
    both also without loss in fewer bytes, with 8.4 and 16.8 MB, twice each.
    """
    nothing = Trials(ways=(), sizes=(), repeats=0, num_bytes=num_bytes, budget_s=budget_s, why="")
    ways = ways_of(fleet, names, compress)
    if len(ways) < 2 or not num_bytes:
        return replace(nothing, why="there is one way to sum")
    least = min(w.seconds(num_bytes) for w in ways)
    near = [w for w in ways if w.seconds(num_bytes) <= FAR * least]
    for pieces, repeats in _EFFORTS:
        sizes = _sizes(num_bytes, *pieces)
        takes_s = sum((repeats + 1) * w.seconds(size) for w in near for size in sizes)
        if takes_s <= _LOOK * budget_s:
            left = counted(len(ways) - len(near), "slower one")
            return Trials(
                ways=tuple(() if w.name == "ring" else w.reductions for w in near),
                sizes=sizes,
                repeats=repeats,
                num_bytes=num_bytes,
                budget_s=budget_s,
                why=f"{'; '.join(w.name for w in near)} tried on the links, for at most {budget_s:g} s"
                + (f"; {left} not" if len(near) < len(ways) else ""),
            )
    return replace(
        nothing,
        why=f"sums are not tried on the links: a first look takes {takes_s:.3g} s, at "
        f"most {_LOOK * budget_s:g} are spent on it",
    )


def again(look: Trials, samples: Samples) -> Trials:
    """Of the ways of a first look those that took nearly the least, with what is left of the budget.

    Each at most `MOST_REPEATS` times, with 16.8 MB as well if there is so much to sum and time for it.
    Example: 1.0, 1.1 and 1.4 s a sum of 8.4 MB, 30 s of which 10.5 are spent: the first two, with 8.4 and
    16.8 MB three times.
    """
    large = [quick(row[-1]) for row in samples]
    near = [i for i, s in enumerate(large) if s <= NEAR * min(large)]
    left_s = look.budget_s - sum((look.repeats + 1) * quick(size) for row in samples for size in row)
    found = replace(look, ways=tuple(look.ways[i] for i in near), budget_s=max(0.0, left_s))
    for sizes in (_sizes(look.num_bytes, *_MOST), look.sizes):
        turn_s = sum(large[i] * size / look.sizes[-1] for i in near for size in sizes)
        repeats = min(MOST_REPEATS, int(left_s / turn_s))
        if repeats > 1 or (repeats and sizes == look.sizes):
            return replace(found, sizes=sizes, repeats=repeats)
    return replace(found, ways=(), sizes=(), repeats=0)


def tried(names: tuple[str, ...], looks: Sequence[tuple[Trials, Samples]]) -> tuple[TriedSum, ...]:
    """What came of trials: by way and size, the seconds until the last device had the sum.

    The lower quartile of all turns, as what disturbs only adds. More bytes never take less: a shorter time of
    a larger buffer is noise.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for trials, samples in looks:
        for reductions, row in zip(trials.ways, samples, strict=True):
            exchange = exchange_of(reductions, names)
            by_size = found.setdefault(exchange.spelled if exchange else spelled_ring(names), {})
            for size, turns in zip(trials.sizes, row, strict=True):
                by_size.setdefault(size, []).extend(turns)
    return tuple(TriedSum(devices=names, way=way, curve=_rising(by_size)) for way, by_size in found.items())


def quick(seconds: Sequence[float]) -> float:
    """The lower quartile. Example: of 1, 2, 3, 4 and 9 it is 2."""
    return quartiles(seconds)[0]


def _sizes(num_bytes: int, *pieces: int) -> tuple[int, ...]:
    wanted = (_SMALL_BYTES, *(p * PIECE_BYTES for p in pieces))
    return tuple(dict.fromkeys(min(size, num_bytes) for size in wanted))


def _rising(by_size: dict[int, list[float]]) -> Curve:
    points: list[tuple[float, float]] = []
    for size, seconds in sorted(by_size.items()):
        points.append((float(size), max(quick(seconds), points[-1][1] if points else 1e-9)))
    return Curve(points=tuple(points), source="measured")
