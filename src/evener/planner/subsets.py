"""Which devices of each group take part in data parallelism: fewest seconds a step over all subsets.

A device that joins takes work from the others and makes the reduction longer. Time over a fixed set is exact
(`balance`); the sets are all tried where they are few, with a bound that skips most, else improved step by
step.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import mul

from evener.core.fleet import Fleet
from evener.cost.exchange import Choice, choose_way
from evener.cost.overlap import Bucket, Tail, tail
from evener.planner.aim import Aim
from evener.planner.balance import balance
from evener.planner.groups import Group
from evener.planner.loads import Load, LoadCurve

_FEW_SETS = 4096
_MOST_TRIED = 150
_MOST_HOSTS = 8  # each alone is a start: more would leave nothing of what may be tried
Counts = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Split:
    """Samples and micro-batch of each device, and the seconds a step takes with them."""

    step_s: float
    samples: dict[str, int]
    micro_batches: dict[str, int]


@dataclass(kw_only=True)
class Pool:
    """The groups that can take part, with what each evaluation shares."""

    fleet: Fleet
    groups: tuple[Group, ...]
    loads: tuple[Load, ...]
    buckets: tuple[Bucket, ...]
    global_batch: int
    sums: str = "auto"
    compress: tuple[str, ...] = ()
    _ways: dict[tuple[str, ...], Choice] = field(default_factory=dict)
    _tails: dict[tuple[str, ...], Tail] = field(default_factory=dict)
    _curves: dict[tuple, LoadCurve] = field(default_factory=dict)

    def names(self, counts: Counts) -> tuple[str, ...]:
        return tuple(n for g, k in zip(self.groups, counts, strict=True) for n in g.names[:k])

    def tail(self, names: tuple[str, ...]) -> Tail:
        """The reduction over the named devices; nothing for one device."""
        if names not in self._tails:
            several = len(names) > 1
            seconds = cache(self.way(names).way.seconds) if several else lambda num_bytes: 0.0
            self._tails[names] = tail(self.buckets if several else (), seconds)
        return self._tails[names]

    def way(self, names: tuple[str, ...]) -> Choice:
        """How the named devices, two or more, sum their gradients."""
        if names not in self._ways:
            sizes = [b.num_bytes for b in self.buckets]
            self._ways[names] = choose_way(self.fleet, names, sizes, sums=self.sums, compress=self.compress)
        return self._ways[names]

    def curve(self, group: int, over: Tail) -> LoadCurve:
        load = self.loads[group]
        key = (load.cost.kind, load.cap, over.still_to_come.tobytes())
        if key not in self._curves:
            self._curves[key] = load.curve(over)
        return self._curves[key]

    def split(self, counts: Counts, *, least: int = 0) -> Split | None:
        """The best split over exactly these devices; None when they cannot hold the batch."""
        used = [g for g, k in enumerate(counts) if k]
        over = self.tail(self.names(counts))
        curves = [self.curve(g, over) for g in used]
        found = balance(
            self.global_batch, [c.seconds for c in curves], [counts[g] for g in used], least=least
        )
        if found is None:
            return None
        samples: dict[str, int] = {}
        micro_batches: dict[str, int] = {}
        for g, curve, row in zip(used, curves, found[1], strict=True):
            for name, n in zip(self.groups[g].names, sorted(row, reverse=True), strict=False):
                if n:
                    samples[name] = n
                    micro_batches[name] = min(int(curve.micro_batches[n]), n)
        if least == 0 and len(samples) < sum(counts):
            return self.split(self.counts_of(samples))
        return Split(step_s=found[0], samples=samples, micro_batches=micro_batches)

    def counts_of(self, samples: dict[str, int]) -> Counts:
        return tuple(sum(1 for n in g.names if samples.get(n)) for g in self.groups)

    def fixed(self, samples: dict[str, int]) -> Split | None:
        """Seconds of a given split (device → samples, all positive); None when it does not fit."""
        over = self.tail(tuple(n for g in self.groups for n in g.names if samples.get(n)))
        step_s, micro_batches = 0.0, {}
        for g, group in enumerate(self.groups):
            for name in group.names:
                n = samples.get(name, 0)
                if n:
                    curve = self.curve(g, over)
                    step_s = max(step_s, curve.seconds[n])
                    micro_batches[name] = min(int(curve.micro_batches[n]), n)
        if step_s == float("inf") or len(micro_batches) < len(samples):
            return None
        return Split(step_s=step_s, samples=samples, micro_batches=micro_batches)

    @cached_property
    def _unhindered(self) -> list[list[float]]:
        """Seconds by samples of each group if the reduction cost nothing."""
        free = tail((), lambda _: 0.0)
        return [self.curve(g, free).seconds for g in range(len(self.groups))]

    def bound_s(self, counts: Counts) -> float:
        """No split over these devices is faster: the reduction costs nothing."""
        used = [g for g, k in enumerate(counts) if k]
        curves = [self._unhindered[g] for g in used]
        found = balance(self.global_batch, curves, [counts[g] for g in used])
        return float("inf") if found is None else found[0]

    def seconds_alone(self, group: int) -> float:
        """Seconds in which one device of the group would take the whole batch; infinite where it cannot."""
        return self._unhindered[group][self.global_batch]

    def room(self, seconds: float) -> list[int]:
        """Samples that a device of each group can take within `seconds` if the reduction cost nothing."""
        return [bisect_right(curve, seconds) - 1 for curve in self._unhindered]


def best_split(pool: Pool, aim: Aim) -> tuple[Split | None, float]:
    """(best split, a value that no subset can beat). The two agree where every subset was covered."""
    sizes = [len(g.names) for g in pool.groups]
    number = 1
    for size in sizes:
        number *= size + 1
    if number <= _FEW_SETS:
        best = _of_all(pool, aim, itertools.product(*(range(k, -1, -1) for k in sizes)))
        return best, aim.value(best.step_s, best.samples) if best else float("inf")
    best = _improved(pool, aim, sizes)
    return best, 0.0 if aim.by_money else pool.bound_s(tuple(sizes))


def _of_all(pool: Pool, aim: Aim, sets: Iterator[Counts]) -> Split | None:
    """Every subset, but those whose devices cannot take the batch in less than the best value so far."""
    best: Split | None = None
    value = float("inf")
    for counts in sorted(sets, key=sum):
        names = pool.names(counts)
        if not names or not aim.allowed(names):
            continue
        if best is not None:
            limit = value / aim.weight(names)
            if sum(map(mul, pool.room(limit), counts)) < pool.global_batch:
                continue
            in_time = pool.room(limit - pool.tail(names).least_s)
            if sum(map(mul, in_time, counts)) < pool.global_batch:
                continue
        found = pool.split(counts)
        if found is not None and aim.value(found.step_s, found.samples) < value:
            best, value = found, aim.value(found.step_s, found.samples)
    return best


def _improved(pool: Pool, aim: Aim, sizes: Sequence[int]) -> Split | None:
    """From all, the best groups, one device and the best hosts, drop or add devices while that helps."""
    worth = sorted(
        range(len(sizes)), key=lambda g: pool.seconds_alone(g) * aim.weight(pool.groups[g].names[:1])
    )
    starts = [tuple(sizes), tuple(int(g == worth[0]) for g in range(len(sizes)))]
    for most in sorted({1, 2, *(len(sizes) * k // 8 for k in range(1, 8))} - {0}):
        starts.append(tuple(k if g in worth[:most] else 0 for g, k in enumerate(sizes)))
    hosts = [pool.fleet.device(g.names[0]).host for g in pool.groups]
    rates = dict.fromkeys(hosts, 0.0)
    for g, host in enumerate(hosts):
        rates[host] += sizes[g] / pool.seconds_alone(g)
    starts += [
        tuple(k * (h == host) for k, h in zip(sizes, hosts, strict=True))
        for host in sorted(rates, key=lambda h: -rates[h])[:_MOST_HOSTS]
    ]
    tried: set[Counts] = set()
    best, value, counts = None, float("inf"), tuple(sizes)

    def attempt(other: Counts) -> None:
        nonlocal best, value, counts
        if other in tried or not any(other) or len(tried) >= _MOST_TRIED:
            return
        tried.add(other)
        found = pool.split(other) if aim.allowed(pool.names(other)) else None
        if found is not None and aim.value(found.step_s, found.samples) < value * (1 - 1e-9):
            best, value = found, aim.value(found.step_s, found.samples)
            counts = pool.counts_of(found.samples)

    for start in starts:
        attempt(start)
    before = None
    while before != counts:
        before = counts
        used = [g for g in reversed(worth) if counts[g]]  # the worst first: leaving them out helps most often
        for g in (*used, *(g for g in worth if g not in used)):
            near = {0, counts[g] // 2, max(counts[g] - 1, 0), min(counts[g] + 1, sizes[g]), sizes[g]}
            for k in sorted(near):
                attempt((*counts[:g], k, *counts[g + 1 :]))
    return best
