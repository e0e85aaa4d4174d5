"""Which ways of summing gradients are tried on a job's links before one is chosen.

What the formula of a sum does not know shows in a trial: messages that wait for one another, processes that
wait for a core. So the few ways that may be the fastest are tried with two sizes each, as time allows.
"""

from collections.abc import Sequence

from evener.core.exchange import PIECE_BYTES, exchange_of
from evener.core.figures import Curve, Value
from evener.core.fleet import Fleet, TriedSum
from evener.core.plan import Reduction
from evener.core.words import counted
from evener.cost.exchange import spelled_ring, ways_of

BUDGET_S = 20.0
FAR = 3.0
"""A way predicted to take so many times the fastest one's seconds is not tried: predictions are better."""
_SMALL_BYTES = 2**16
_EFFORTS = ((4, 8, 4), (4, 8, 2), (2, 4, 3), (2, 4, 2), (2, 4, 1))
"""Pieces of both large sizes, and how often: the most that there is time for."""


class Trials(Value, frozen=True, kw_only=True):
    """The ways to try, each by what a plan says of it (none for the ring), with buffers of `sizes` bytes.

    Each size `repeats` times after once to warm up. `why` says what is tried and what is not.
    """

    ways: tuple[tuple[Reduction, ...], ...]
    sizes: tuple[int, ...]
    repeats: int
    why: str


def trials_of(
    fleet: Fleet, names: tuple[str, ...], compress: Sequence[str], num_bytes: int, budget_s: float = BUDGET_S
) -> Trials:
    """The trials of sums of `num_bytes` of gradients over `names` that take at most `budget_s` seconds.

    Nothing to try where there is one way. Example: 2 hosts of 2 at 125 MB/s, 20 MB: ring, 1 lane and 2 lanes
    with 8.4 and 16.8 MB, four times each.
    """
    ways = ways_of(fleet, names, compress)
    if len(ways) < 2 or not num_bytes:
        return Trials(ways=(), sizes=(), repeats=0, why="there is one way to sum")
    least = min(w.seconds(num_bytes) for w in ways)
    near = [w for w in ways if w.seconds(num_bytes) <= FAR * least]
    for *pieces, repeats in _EFFORTS:
        wanted = (_SMALL_BYTES, *(p * PIECE_BYTES for p in pieces))
        sizes = tuple(dict.fromkeys(min(size, num_bytes) for size in wanted))
        takes_s = sum((repeats + 1) * w.seconds(size) for w in near for size in sizes)
        if takes_s <= budget_s:
            left = counted(len(ways) - len(near), "slower one")
            return Trials(
                ways=tuple(() if w.name == "ring" else w.reductions for w in near),
                sizes=sizes,
                repeats=repeats,
                why=f"{', '.join(w.name for w in near)} tried on the links for about {takes_s:.2g} s"
                + (f"; {left} not" if len(near) < len(ways) else ""),
            )
    return Trials(
        ways=(),
        sizes=(),
        repeats=0,
        why=f"sums are not tried on the links: that takes {takes_s:.3g} s, at most {budget_s:g} are spent",
    )


def tried(trials: Trials, names: tuple[str, ...], seconds: Sequence[Sequence[float]]) -> tuple[TriedSum, ...]:
    """What came of `trials`: by way and size, the seconds until the last device had the sum.

    More bytes never take less: a shorter time of a larger buffer is noise.
    """
    found = []
    for reductions, row in zip(trials.ways, seconds, strict=True):
        exchange = exchange_of(reductions, names)
        points: list[tuple[float, float]] = []
        for size, taken in zip(trials.sizes, row, strict=True):
            points.append((float(size), max(taken, points[-1][1] if points else 1e-9)))
        way = exchange.spelled if exchange else spelled_ring(names)
        found.append(TriedSum(devices=names, way=way, curve=Curve(points=tuple(points), source="measured")))
    return tuple(found)
