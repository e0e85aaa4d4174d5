"""Which pipelines side by side: all ways to divide a few devices, judged exactly, then polished.

Estimates order the candidates, `evaluate` decides: it knows the smaller last micro-batch, fill and drain,
and the reduction behind the last backward, which an option on its own cannot know.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from evener.core.plan import Plan
from evener.cost.evaluate import PipelineCost, pipeline_cost, step_seconds
from evener.planner.aim import Aim
from evener.planner.assemble import Names, curve_of, pipeline_of, plan_of
from evener.planner.balance import balance
from evener.planner.blocks import Tables
from evener.planner.options import Counts, Option, seconds_of

Parts = tuple[tuple[Option, int], ...]


@dataclass(kw_only=True)
class Judge:
    """Evaluates combinations by the aim and remembers the best one; values are seconds or money a step.

    `least_with` is the least value, or a bound below it, of the combinations that use a device.
    """

    tables: Tables
    global_batch: int
    aim: Aim
    best_value: float = float("inf")
    best: Parts = ()
    least_with: dict[str, float] = field(default_factory=dict)
    _seen: dict[Parts, float] = field(default_factory=dict)
    _costs: dict[tuple, PipelineCost] = field(default_factory=dict)

    def __call__(self, parts: Parts) -> float:
        """The value of a combination; of one whose compute alone is no better than the best, only that."""
        parts = tuple((o, n) for o, n in parts if n)
        if not all(o.allows(n) for o, n in parts):
            return float("inf")
        if parts not in self._seen:
            names = Names(self.tables)
            costs = [self._cost(option, n, names) for option, n in parts]
            devices = [h.device for c in costs for h in c.holders]
            value = self.aim.value(max(c.end_s for c in costs), devices)
            if value < self.best_value:
                value = self.aim.value(step_seconds(self.tables.model, costs), devices)
            self._seen[parts] = value
            for name in devices:
                self.least_with[name] = min(value, self.least_with.get(name, value))
            if value < self.best_value * (1 - 1e-12):
                self.best_value, self.best = value, parts
        return self._seen[parts]

    def price(self, division: Sequence[Counts]) -> float:
        """What a second of these devices costs, by the first of each group."""
        names = [
            n
            for g, group in enumerate(self.tables.groups)
            for n in group.names[: sum(counts[g] for counts in division)]
        ]
        return self.aim.weight(names)

    def _cost(self, option: Option, samples: int, names: Names) -> PipelineCost:
        taken = names.take(option)
        key = (option, samples, taken)
        if key not in self._costs:
            made = pipeline_of(self.tables, option, samples, taken)
            self._costs[key] = pipeline_cost(self.tables.model, made)
        return self._costs[key]

    def plan(self, parts: Parts) -> Plan:
        """The combination as a plan."""
        return plan_of(self.tables, self.global_batch, parts)


def divisions(counts: Counts, options: dict[Counts, list[Option]]) -> Iterator[tuple[Counts, ...]]:
    """All ways to form pipelines from parts of these devices, each multiset once; devices may stay idle."""
    keys = sorted(c for c in options if options[c])

    def extend(start: int, left: Counts) -> Iterator[tuple[Counts, ...]]:
        yield ()
        for k in range(start, len(keys)):
            rest = tuple(a - b for a, b in zip(left, keys[k], strict=True))
            if min(rest) >= 0:
                for others in extend(k, rest):
                    yield (keys[k], *others)

    return (d for d in extend(0, counts) if d)


def search(judge: Judge, counts: Counts, options: dict[Counts, list[Option]], most: int) -> None:
    """Estimate every division, evaluate the `most` promising ones, polish the best few."""
    total = judge.global_batch
    curves = {
        (c, beside): curve_of(found, total, beside=beside)
        for c, found in options.items()
        if found
        for beside in (False, True)
    }
    drafts: list[tuple[float, tuple[Counts, ...], list[int]]] = []
    for division in divisions(counts, options):
        held = [curves[c, len(division) > 1][0] for c in division]
        balanced = balance(total, held, [1] * len(division))
        if balanced is not None and balanced[0] < float("inf"):
            drafts.append((balanced[0] * judge.price(division), division, [row[0] for row in balanced[1]]))
    drafts.sort(key=lambda d: d[0])
    starts: list[tuple[float, Parts]] = []
    for place, (_, division, samples) in enumerate(drafts[:most]):
        found = _joint_choices(division, samples, options, total, 64 if place < WIDE else 1)
        starts += sorted(((judge(parts), parts) for parts in found), key=lambda x: x[0])[:1]
    siblings = {o: found for found in options.values() for o in found}
    for _, parts in sorted(starts, key=lambda x: x[0])[:POLISHED]:
        polish(judge, parts, siblings)


def _joint_choices(
    division: tuple[Counts, ...],
    samples: list[int],
    options: dict[Counts, list[Option]],
    total: int,
    most: int,
) -> Iterator[Parts]:
    """The most promising options of each pipeline in all combinations, up to `most`, each balanced anew.

    Reductions cost less where cuts of several pipelines coincide: that shows only when they are chosen
    together.
    """
    beside = len(division) > 1
    each = max(1, int(most ** (1 / len(division)) + 1e-9))
    choices = []
    for c, n in zip(division, samples, strict=True):
        seconds = seconds_of(options[c], np.array([max(n, 1)]), beside=beside)[:, 0]
        choices.append([options[c][i] for i in np.argsort(seconds, kind="stable")[:each]])
    for chosen in itertools.product(*choices):
        held = [curve_of([o], total, beside=beside)[0] for o in chosen]
        balanced = balance(total, held, [1] * len(division))
        if balanced is not None and balanced[0] < float("inf"):
            yield tuple((o, row[0]) for o, row in zip(chosen, balanced[1], strict=True) if row[0])


WIDE = 30
POLISHED = 20


def polish(judge: Judge, parts: Parts, siblings: dict[Option, list[Option]]) -> None:
    """Change one pipeline's option, or move samples between two, while that helps."""
    current, seconds = parts, judge(parts)
    moved = True
    while moved:
        moved = False
        for candidate in _neighbours(current, siblings):
            found = judge(candidate)
            if found < seconds * (1 - 1e-9):
                current, seconds, moved = candidate, found, True
                break


def _neighbours(parts: Parts, siblings: dict[Option, list[Option]]) -> Iterator[Parts]:
    for p, (option, n) in enumerate(parts):
        for other in siblings[option]:
            if other != option:
                yield (*parts[:p], (other, n), *parts[p + 1 :])
    for p, (giver, n) in enumerate(parts):
        for q, (taker, k) in enumerate(parts):
            if p != q:
                for step in sorted({1, giver.micro_batch, taker.micro_batch}):
                    if step <= n:
                        changed = list(parts)
                        changed[p], changed[q] = (giver, n - step), (taker, k + step)
                        yield tuple(x for x in changed if x[1])
