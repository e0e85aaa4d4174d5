"""Measuring in rounds: every task is sampled once a round, so that each sees the whole probing time.

round 1: matrix float32, matrix bfloat16, memory, 64 B message, ...   fastest call of a short slot each
round 2: matrix float32, matrix bfloat16, memory, 64 B message, ...
   ...   value = median over the rounds, spread = what covers all rounds
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from evener.core.figures import Curve, Figure

Clock = Callable[[], float]
Progress = Callable[[float, str], None]
LEAST_ROUNDS = 4
MOST_ROUNDS = 40
LEAST_SPREAD = 0.05
"""Nothing is claimed to be known better than this: quiet probes of one machine differ by up to 4 %."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One thing to measure: `sample()` gives the seconds it took in this round."""

    name: str
    sample: Callable[[], float]


def fastest(call: Callable[[], object], *, clock: Clock, slot_s: float, least: int = 3) -> float:
    """Seconds of the fastest of the calls that fit in `slot_s` seconds, `least` of them at least.

    The fastest call is one that nothing else on the machine disturbed; changes that last longer than a slot
    (heat, a busy neighbour) show in the next round instead. One call ahead of the clock warms up.
    """
    call()
    best = float("inf")
    start = clock()
    calls = 0
    while calls < least or clock() - start < slot_s:
        before = clock()
        call()
        best = min(best, clock() - before)
        calls += 1
    return best


def run_rounds(
    tasks: Sequence[Task], *, clock: Clock, seconds: float, progress: Progress | None = None
) -> dict[str, list[float]]:
    """Samples by task name, from as many rounds as fit in `seconds` (4 to 40), plus one that warms up.

    `progress` gets the part done (0 to 1) and the task's name before each sample.
    """
    samples: dict[str, list[float]] = {task.name: [] for task in tasks}
    start = clock()
    for number in range(-1, MOST_ROUNDS):
        enough = number >= LEAST_ROUNDS
        if enough and clock() - start >= seconds:
            break
        for place, task in enumerate(tasks):
            if progress:
                rounds_done = (number + 1 + place / len(tasks)) / (LEAST_ROUNDS + 1)
                progress(min(1.0, rounds_done, max(0.0, clock() - start) / seconds), task.name)
            taken = task.sample()
            if number >= 0:
                samples[task.name].append(taken)
    return samples


def covering(samples: Sequence[float], *, note: str = "") -> Figure:
    """The median of one sample a round, with a spread that covers another probe.

    spread = max(0.05, (largest - smallest) / median · (1 + 6 / rounds)): the whole range on either side,
    since the other probe scatters too, and wider where few rounds have shown little of the range (found by
    probing a busy machine again and again). Example: twelve rounds from 9 to 11 around 10 give 10 with a
    spread of 0.3.
    """
    middle = median(samples)
    reach = (max(samples) - min(samples)) / middle
    spread = max(LEAST_SPREAD, reach * (1 + 6 / len(samples)))
    return Figure(value=middle, source="measured", spread=spread, note=note)


def fit_curve(samples: Mapping[float, Sequence[float]]) -> Curve:
    """The non-decreasing curve nearest to the medians of `samples` (bytes → seconds, one a round).

    Isotonic regression by pooling adjacent violators (Barlow 1972): neighbours in the wrong order share
    their mean. Points pooled at the end become one, at the largest bytes, so that the curve goes on rising
    beyond it. Example: medians 2, 1, 5 at 1, 2, 3 bytes give the points (1, 1.5), (2, 1.5), (3, 5).
    """
    sizes = sorted(samples)
    figures = [covering(samples[size]) for size in sizes]
    pools: list[tuple[float, int]] = []  # mean and number of members
    for figure in figures:
        pools.append((figure.value, 1))
        while len(pools) > 1 and pools[-1][0] < pools[-2][0]:
            (mean, members), (mean_before, members_before) = pools.pop(), pools.pop()
            both = members + members_before
            pools.append(((mean * members + mean_before * members_before) / both, both))
    seconds = [mean for mean, members in pools for _ in range(members)]
    points = list(zip(sizes, seconds, strict=True))
    if len(pools) > 1 and pools[-1][1] > 1:
        points = points[: -pools[-1][1]] + points[-1:]
    moved = max(abs(s - f.value) / f.value for s, f in zip(seconds, figures, strict=True))
    spread = max(figure.spread for figure in figures) + moved
    return Curve(points=tuple((float(b), s) for b, s in points), source="measured", spread=spread)
