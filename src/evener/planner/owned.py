"""State in unequal parts: samples by speed, as far as memory allows their activations; parts by what is left.

    memory of a  │ whole │ activations │ part of the state ........... │
    memory of b  │ whole │ act. │ part │        sum of all room ≥ state, or smaller micro-batches

What a micro-batch takes is the same on every device, so that the sum of activations depends on the number of
micro-batches alone: samples can be shared by speed first, and parts fill the memory that is left.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from evener.core.job import Job
from evener.core.ownership import handover
from evener.core.plan import HELD
from evener.core.split import apportion
from evener.planner.balance import balance
from evener.planner.groups import Group
from evener.planner.owned_moves import FEW_DEVICES, FEW_PRICED, polished, simpler
from evener.planner.owned_prices import WHOLE, Draft, OwnedPlan, OwnedPrices
from evener.planner.parts import filled

Counts = tuple[int, ...]
_MOST_SETS = 256
_MORE_ROUNDS = 3  # numbers of micro-batches tried beyond the fewest that fit


@dataclass(kw_only=True)
class OwnedSearch(OwnedPrices):
    """The best plan in which owners keep `held` in parts, over any subset of the devices of `groups`."""

    _curves: dict[tuple, list[float]] = field(default_factory=dict)
    _wires: dict[tuple[str, ...], float] = field(default_factory=dict)

    def best(self) -> OwnedPlan | None:
        """The best one; None where nothing fits."""
        best: OwnedPlan | None = None
        able = [self.most_part(1, g.usable_bytes) >= 0 for g in self.groups]
        held = sum(max(self.most_part(0, g.usable_bytes), 0) * len(g.names) for g in self.groups)
        if held < WHOLE or not any(able):
            return None
        many = len(self.usable) > FEW_DEVICES
        for some, counts in self._sets():
            if many and best is not None and len(self.priced) > FEW_PRICED:
                break
            if any(k and not can for k, can in zip(some, able, strict=True)):
                continue
            for draft in self._drafts(some, counts, best):
                found = self.price(draft)
                if found is not None and (best is None or found.value < best.value):
                    best = found
        if not given_or_kept(self.job):
            rules = [self.by(weights) for weights in self.rules().values()]
            best = min((r for r in (best, *rules) if r), key=lambda r: r.value, default=None)
        return None if best is None else simpler(self, polished(self, best))

    def rules(self) -> dict[str, dict[str, float]]:
        """What both samples and state may go by in the hands of one who has a single rule."""
        finite = [g.usable_bytes for g in self.groups if g.usable_bytes < float("inf")]
        most = max(finite, default=1.0)
        names = [(n, g) for g in self.groups for n in g.names]
        rate = {g.kind: self._rate(g.kind) for g in self.groups}
        return {
            "by speed": {n: rate[g.kind] for n, g in names},
            "by memory": {n: min(g.usable_bytes, most) for n, g in names},
        }

    def _rate(self, kind: str) -> float:
        """Samples a second of a kind in its best micro-batch."""
        one = self._seconds(kind)
        return max(size / one[size] for size in range(1, len(one)))

    def _sets(self) -> Iterator[tuple[Counts, Counts]]:
        """How many devices of each group take samples, and how many hold state: most samples first.

        With few groups every mixture; with many all of them, and fewer of each.
        """
        sizes = tuple(len(g.names) for g in self.groups)
        each = [[(c, k) for k in range(size + 1) for c in range(k + 1)] for size in sizes]
        if self.job.keep_all:
            yield sizes, sizes
        elif int(np.prod([float(len(x)) for x in each])) <= _MOST_SETS:
            pairs = [(tuple(c for c, _ in x), tuple(k for _, k in x)) for x in itertools.product(*each)]
            yield from sorted((p for p in pairs if any(p[0])), key=lambda p: (-sum(p[0]), -sum(p[1]), p))
        else:
            yield sizes, sizes
            for g, size in enumerate(sizes):
                for fewer in sorted({0, size // 2, size - 1}, reverse=True):
                    some = (*sizes[:g], fewer, *sizes[g + 1 :])
                    if any(some):
                        yield some, sizes
                        yield some, some

    def _drafts(self, some: Counts, counts: Counts, best: OwnedPlan | None) -> Iterator[Draft]:
        """Drafts over so many devices of each group, by number of micro-batches from the fewest that fit."""
        names = tuple(n for g, k in zip(self.groups, counts, strict=True) for n in g.names[:k])
        if not self.aim.allowed(names):
            return
        fitting = 0
        for rounds in self.rounds():
            if best is not None and self.aim.value(self.least_s(some, rounds), names) >= best.value:
                continue
            taken = self._samples(some, rounds, self._wire_s(names))
            if taken is None:
                continue
            samples, sizes = taken
            row = tuple(samples.get(n, 0) for n in names), tuple(sizes.get(n, 0) for n in names)
            caps = self.caps(names, row[1])
            if min(caps) < 0 or sum(caps) < WHOLE:
                continue
            fitting += 1
            for weights in self._weights(names, caps):
                parts = filled(caps, weights, WHOLE)
                if parts is not None:
                    yield Draft(names, *row, parts)
            if fitting > _MORE_ROUNDS:
                return

    def rounds(self) -> list[int]:
        """Numbers of micro-batches worth trying: all up to 4, then about a factor of 1.5 apart."""
        found, most = [1, 2, 3, 4], self.job.global_batch
        while found[-1] < most:
            found.append(round(found[-1] * 1.5))
        return [r for r in found if r < most] + [most]

    def least_s(self, counts: Counts, rounds: int) -> float:
        """Seconds that no split over these devices can beat, if what is sent took no time."""
        used = [(g, k) for g, k in zip(self.groups, counts, strict=True) if k]
        curves = [self._curve(g, self.largest_size(g), rounds, 0.0) for g, _ in used]
        found = balance(self.job.global_batch, curves, [k for _, k in used])
        return float("inf") if found is None else found[0]

    def bound_s(self) -> float:
        """Seconds that no plan can beat: every device in its best micro-batch, what is sent takes no time."""
        n = np.arange(self.job.global_batch + 1)
        curves = []
        for group in self.groups:
            seconds = self._fixed_s(group.kind) + n / self._rate(group.kind)
            seconds[0] = 0.0
            curves.append(seconds.tolist())
        found = balance(self.job.global_batch, curves, [len(g.names) for g in self.groups])
        assert found is not None, "no curve ends before the global batch"
        return found[0]

    def _samples(
        self, counts: Counts, rounds: int, wire_s: float
    ) -> tuple[dict[str, int], dict[str, int]] | None:
        """(samples, micro-batches) by speed in about `rounds` micro-batches; None where memory forbids it."""
        used = [(g, k) for g, k in zip(self.groups, counts, strict=True) if k]
        limits = [self.largest_size(g) for g, _ in used]
        curves = [self._curve(g, limit, rounds, wire_s) for (g, _), limit in zip(used, limits, strict=True)]
        given = self.job.batch_per_device
        if given is not None:
            rows = [[given.get(n, 0) for n in g.names[:k]] for g, k in used]
            if sum(map(sum, rows)) != self.job.global_batch:
                return None
            if max(c[n] for c, row in zip(curves, rows, strict=True) for n in row) == float("inf"):
                return None
        else:
            found = balance(
                self.job.global_batch, curves, [k for _, k in used], least=1 if self.job.keep_all else 0
            )
            if found is None or found[0] == float("inf"):
                return None
            rows = [sorted(row, reverse=True) for row in found[1]]
        names = [n for g, k in used for n in g.names[:k]]
        samples = dict(zip(names, (n for row in rows for n in row), strict=True))
        sized = (self._size(n, limit, rounds) for limit, row in zip(limits, rows, strict=True) for n in row)
        return samples, dict(zip(names, sized, strict=True))

    def _size(self, samples: int, limit: int, rounds: int) -> int:
        if not samples:
            return 0
        if self.job.micro_batch is not None:
            return min(self.job.micro_batch, samples)
        return min(-(-samples // rounds), limit)

    def _curve(self, group: Group, limit: int, rounds: int, wire_s: float) -> list[float]:
        """Seconds of n samples on a device of `group`, by n: compute, no less a micro-batch than its wire."""
        key = (group.kind, limit, rounds, wire_s)
        if key not in self._curves:
            n = np.arange(self.job.global_batch + 1)
            size = np.array([self._size(int(k), limit, rounds) for k in n])
            one = self._seconds(group.kind)
            can = (size > 0) & (size <= limit)
            at = np.where(can, size, 1)
            full, rest = np.divmod(n, at)
            wire = np.where(np.arange(len(one)) > 0, wire_s, 0.0)
            each = np.maximum(one, wire)
            seconds = np.where(can, full * each[np.minimum(at, len(one) - 1)] + each[rest], np.inf)
            seconds[1:] += self._fixed_s(group.kind)
            seconds[0] = 0.0
            self._curves[key] = np.maximum.accumulate(seconds).tolist()
        return self._curves[key]

    def _seconds(self, kind: str) -> np.ndarray:
        """Compute and input of one micro-batch by its size."""
        table, step = self.model.layers(kind), self.model.step(kind)
        found = np.zeros(min(table.largest, self.job.global_batch) + 1)
        for size in range(1, len(found)):
            found[size] = sum(float(x.sum()) for x in table.seconds(size))
            found[size] += float(step.input_s[min(size, step.largest)]) if step else 0.0
        return found

    def _fixed_s(self, kind: str) -> float:
        step = self.model.step(kind)
        return (step.overhead_s if step else 0.0) + self.model.trainer.step_s

    def _wire_s(self, names: Sequence[str]) -> float:
        """About the seconds of a micro-batch's exchanges among these devices, parts alike."""
        key = tuple(names)
        if key not in self._wires:
            self._wires[key] = self._exchange_s(names)
        return self._wires[key]

    def _exchange_s(self, names: Sequence[str]) -> float:
        level = HELD.index(self.held) + 1
        if level < 2 or len(names) < 2:
            return 0.0
        data, fleet = self.model.bytes, self.model.fleet
        parameters, gradients = float(self._owners.once.sum()), float(self._owners.gradients.sum())
        pieces = max(1, round(parameters / min(data.bucket_bytes, parameters or 1.0)))
        alike = dict.fromkeys(names, 1)
        there = handover(alike, fleet, adds=True).seconds(gradients / pieces)
        back = handover(alike, fleet, adds=False).seconds(parameters / pieces)
        return pieces * (there + (2 * back if level > 2 else 0.0)) * 0.9  # what stays is not gathered twice

    def _weights(self, names: Sequence[str], caps: Sequence[int]) -> Iterator[list[float]]:
        """What parts may go by: all alike (the wire's best), memory left, and speed of the owner's step."""
        yield [1.0] * len(names)
        yield [float(max(cap, 0)) for cap in caps]
        kinds = [self.model.fleet.device(n).kind for n in names]
        updates = [float(self.model.layers(k).update_s.sum()) for k in kinds]
        if len(set(updates)) > 1 and min(updates) > 0:
            yield [1 / u for u in updates]

    def by(self, weights: Mapping[str, float]) -> OwnedPlan | None:
        """Samples and state both by the same weights, in the best number of micro-batches; None: no fit.

        What people do who have one rule for both.
        """
        names = tuple(weights)
        counts = tuple(sum(n in weights for n in g.names) for g in self.groups)
        ordered = [n for g, k in zip(self.groups, counts, strict=True) for n in g.names if k and n in weights]
        samples = apportion(self.job.global_batch, [weights[n] for n in ordered])
        parts = apportion(WHOLE, [weights[n] for n in ordered])
        limits = {n: self.largest_size(g) for g in self.groups for n in g.names}
        found = []
        for rounds in self.rounds():
            sizes = tuple(self._size(k, limits[n], rounds) for n, k in zip(ordered, samples, strict=True))
            if all(s > 0 or not k for s, k in zip(sizes, samples, strict=True)):
                found.append(self.price(Draft(tuple(ordered), samples, sizes, parts)))
        assert len(ordered) == len(names), "weights name devices of the groups"
        return min((f for f in found if f), key=lambda f: f.value, default=None)


def given_or_kept(job: Job) -> bool:
    """Whether the job says who takes part."""
    return job.batch_per_device is not None or job.keep_all
