"""Which pipelines side by side: all ways to divide a few devices, judged exactly, then polished.

Estimates order the candidates, `evaluate` decides: it knows the smaller last micro-batch, fill and drain,
and the reduction behind the last backward, which an option on its own cannot know.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from evener.core.plan import Plan
from evener.cost.evaluate import evaluate
from evener.planner.assemble import curve_of, plan_of
from evener.planner.balance import balance
from evener.planner.blocks import Tables
from evener.planner.options import Counts, Option

Parts = tuple[tuple[Option, int], ...]


@dataclass(kw_only=True)
class Judge:
    """Evaluates combinations and remembers the best one."""

    tables: Tables
    global_batch: int
    best_s: float = float("inf")
    best: Parts = ()
    evaluated: int = 0
    _seen: dict[Parts, float] = field(default_factory=dict)

    def __call__(self, parts: Parts) -> float:
        parts = tuple((o, n) for o, n in parts if n)
        if parts not in self._seen:
            self.evaluated += 1
            self._seen[parts] = evaluate(self.tables.model, self.plan(parts)).step_s
        seconds = self._seen[parts]
        if seconds < self.best_s * (1 - 1e-12):
            self.best_s, self.best = seconds, parts
        return seconds

    def plan(self, parts: Parts) -> Plan:
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
    drafts: list[tuple[float, Parts]] = []
    for division in divisions(counts, options):
        held = [curves[c, len(division) > 1] for c in division]
        balanced = balance(total, [seconds for seconds, _ in held], [1] * len(division))
        if balanced is not None:
            samples = [row[0] for row in balanced[1]]
            parts = tuple(
                (options[c][best[n]], n) for c, (_, best), n in zip(division, held, samples, strict=True) if n
            )
            drafts.append((balanced[0], parts))
    drafts.sort(key=lambda d: d[0])
    judged = sorted(((judge(parts), parts) for _, parts in drafts[:most]), key=lambda d: d[0])
    siblings = {o: found for found in options.values() for o in found}
    for _, parts in judged[:POLISHED]:
        polish(judge, parts, siblings)


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
