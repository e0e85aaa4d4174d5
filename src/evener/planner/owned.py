"""State in unequal parts: samples by speed, as far as memory allows their activations; parts by what is left.

    memory of a  │ whole │ activations │ part of the state ........... │
    memory of b  │ whole │ act. │ part │        sum of all room ≥ state, or smaller micro-batches

What a micro-batch takes is the same on every device, so that the sum of activations depends on the number of
micro-batches alone: samples can be shared by speed first, and parts fill the memory that is left.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from evener.core.job import Job
from evener.core.ownership import handover
from evener.core.plan import HELD, Held, Ownership, Pipeline, Plan, Share, Stage
from evener.core.split import apportion
from evener.cost.model import CostModel
from evener.cost.owned import OwnedCost, play_owned
from evener.cost.owned_memory import Owners, owners_of
from evener.planner.aim import Aim
from evener.planner.balance import balance
from evener.planner.groups import Group
from evener.planner.parts import filled, simple

Counts = tuple[int, ...]
WHOLE = 1000
"""Parts are searched in thousandths."""
_MOST_SETS = 256
_MOST_PRICED = 160
_FEW_DEVICES = 16
_FEW_PRICED = 40  # with more devices a price takes longer and single ones matter less
_MORE_ROUNDS = 3  # numbers of micro-batches tried beyond the fewest that fit
_SIMPLER = 0.0005  # small whole numbers may cost so much


@dataclass(frozen=True)
class Draft:
    """Who takes what: samples, micro-batch and part by device, in one order."""

    names: tuple[str, ...]
    samples: tuple[int, ...]
    sizes: tuple[int, ...]
    parts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class OwnedPlan:
    """A plan with owners, its price, and what makes it better than others (see `Aim`)."""

    plan: Plan
    cost: OwnedCost
    value: float
    draft: Draft


@dataclass(kw_only=True)
class OwnedSearch:
    """The best plan in which owners keep `held` in parts, over any subset of the devices of `groups`.

    Groups must have seconds by layer. A plan fits when every device's predicted bytes stay within its group's
    `usable_bytes`.
    """

    model: CostModel
    job: Job
    aim: Aim
    groups: tuple[Group, ...]
    held: Held
    _prices: dict[Draft, OwnedPlan | None] = field(default_factory=dict)
    _limits: dict[tuple[int, float], int] = field(default_factory=dict)
    _curves: dict[tuple, list[float]] = field(default_factory=dict)
    _wires: dict[tuple[str, ...], float] = field(default_factory=dict)

    def best(self) -> OwnedPlan | None:
        """The best one; None where nothing fits."""
        best: OwnedPlan | None = None
        able = [self.most_part(1, g.usable_bytes) >= 0 for g in self.groups]
        held = sum(max(self.most_part(0, g.usable_bytes), 0) * len(g.names) for g in self.groups)
        if held < WHOLE or not any(able):
            return None
        many = len(self._usable) > _FEW_DEVICES
        for some, counts in self._sets():
            if many and best is not None and len(self._prices) > _FEW_PRICED:
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
        return None if best is None else self._simpler(self._polished(best))

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

    def price(self, draft: Draft) -> OwnedPlan | None:
        """The draft as a plan with its price; None where a device's memory would not hold it."""
        if draft not in self._prices:
            fits = all(
                self.most_part(size if n else 0, self._usable[name]) >= part
                for name, n, size, part in zip(
                    draft.names, draft.samples, draft.sizes, draft.parts, strict=True
                )
            )
            found = None
            if fits:
                plan = self.plan_of(draft)
                cost = play_owned(self.model, plan)
                value = self.aim.value(cost.step_s, plan.devices)
                found = OwnedPlan(plan=plan, cost=cost, value=value, draft=draft)
            self._prices[draft] = found
        return self._prices[draft]

    def least_with(self, device: str) -> float:
        """Seconds of the best plan seen that uses `device`; infinite where none was."""
        priced = (p for p in self._prices.values() if p is not None and device in p.draft.names)
        return min((p.cost.step_s for p in priced), default=float("inf"))

    def plan_of(self, draft: Draft) -> Plan:
        """The draft as a plan."""
        layers = tuple(x.name for x in self.model.profile.layers)
        pipelines = tuple(
            Pipeline(
                samples=n,
                micro_batch=size if n else 1,
                stages=(Stage(layers=layers, shares=(Share(devices=(name,), samples=size if n else 1),)),),
            )
            for name, n, size in zip(draft.names, draft.samples, draft.sizes, strict=True)
        )
        parts = dict(zip(draft.names, draft.parts, strict=True))
        owners = tuple(
            Ownership(layer=x.name, parts=parts, held=self.held)
            for x in self.model.profile.layers
            if x.param_bytes
        )
        return Plan(global_batch=self.job.global_batch, pipelines=pipelines, schedule="1f1b", owners=owners)

    @cached_property
    def _usable(self) -> dict[str, float]:
        return {name: g.usable_bytes for g in self.groups for name in g.names}

    @cached_property
    def _owners(self) -> Owners:
        """Owners over one device, whose parts are set as needed."""
        name = self.groups[0].names[0]
        alone = Draft((name,), (self.job.global_batch,), (1,), (1,))
        return owners_of(self.model.profile, self.model.bytes, self.plan_of(alone))

    def bytes_with(self, size: int, part: float) -> float:
        """What a device holds with this part of 1 and micro-batches of `size` (0: no samples)."""
        owners = self._owners
        (name,) = owners.parts
        owners.parts[name][:] = part  # the one device stands for any
        return owners.memory(name, size).total

    def most_part(self, size: int, usable: float) -> int:
        """The largest part, in thousandths, that fits beside micro-batches of `size`; -1 where none does."""
        key = (size, usable)
        if key not in self._limits:
            low, high = -1, WHOLE
            while low < high:
                middle = (low + high + 1) // 2
                fits = self.bytes_with(size, middle / WHOLE) <= usable
                low, high = (middle, high) if fits else (low, middle - 1)
            self._limits[key] = low
        return self._limits[key]

    def _caps(self, names: Sequence[str], sizes: Sequence[int]) -> list[int]:
        return [self.most_part(size, self._usable[n]) for n, size in zip(names, sizes, strict=True)]

    def largest_size(self, group: Group) -> int:
        """The largest micro-batch that was measured and fits beside no state of one's own; 0 where none."""
        low, high = 0, min(self.model.layers(group.kind).largest, self.job.global_batch)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if self.most_part(middle, group.usable_bytes) >= 0 else (low, middle - 1)
            )
        return low

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
            caps = self._caps(names, row[1])
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

    def _polished(self, best: OwnedPlan) -> OwnedPlan:
        """Move parts, samples and micro-batches while that helps."""
        budget = _MOST_PRICED if len(self._usable) <= _FEW_DEVICES else _FEW_PRICED
        improved = True
        while improved and budget > 0:
            improved = False
            for draft in self._neighbours(best):
                if draft not in self._prices:
                    budget -= 1
                found = self.price(draft)
                if found is not None and found.value < best.value * (1 - 1e-6):
                    best, improved = found, True
                    break
                if budget <= 0:
                    break
        return best

    def _neighbours(self, best: OwnedPlan) -> Iterator[Draft]:
        draft, names = best.draft, best.draft.names
        order = sorted(range(len(names)), key=lambda i: -best.cost.seconds[names[i]]["wait"])
        late = order[::-1][: 4 if len(names) > 6 else len(names)]
        early = order[: 4 if len(names) > 6 else len(names)]
        if self.job.micro_batch is None:
            for i, (n, size) in enumerate(zip(draft.samples, draft.sizes, strict=True)):
                for other in sorted({size * 2, size + 1, size - 1, size // 2}, reverse=True):
                    if n and 0 < other <= min(n, self.model.layers(self._kind(names[i])).largest):
                        yield self._refilled(draft, sizes=_set(draft.sizes, i, other))
        if self.job.batch_per_device is None:
            for i in late:
                for j in early:
                    for amount in sorted({max(1, draft.samples[i] // 8), 1}, reverse=True):
                        if i != j and draft.samples[i] - amount >= int(self.job.keep_all):
                            yield from self._moved(draft, i, j, amount)
        for amount in (WHOLE // 8, WHOLE // 32, WHOLE // 128):
            for i in range(len(names)):
                for j in range(len(names)):
                    if i != j and draft.parts[i] >= amount:
                        parts = _set(
                            _set(draft.parts, i, draft.parts[i] - amount), j, draft.parts[j] + amount
                        )
                        yield Draft(names, draft.samples, draft.sizes, parts)

    def _kind(self, name: str) -> str:
        return self.model.fleet.device(name).kind

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

    def _moved(self, draft: Draft, i: int, j: int, amount: int) -> Iterator[Draft]:
        """`amount` samples from device i to j, in as many micro-batches as before."""
        samples = _set(_set(draft.samples, i, draft.samples[i] - amount), j, draft.samples[j] + amount)
        sizes = draft.sizes
        for k in (i, j):
            rounds = -(-draft.samples[k] // draft.sizes[k]) if draft.sizes[k] else 1
            fixed = self.job.micro_batch
            size = -(-samples[k] // rounds) if fixed is None else min(fixed, samples[k])
            if size > self.model.layers(self._kind(draft.names[k])).largest:
                return
            sizes = _set(sizes, k, size)
        yield self._refilled(Draft(draft.names, samples, sizes, draft.parts), sizes=sizes)

    def _refilled(self, draft: Draft, *, sizes: tuple[int, ...]) -> Draft:
        """The draft with other micro-batches, and parts as near to its own as memory then allows."""
        caps = self._caps(draft.names, sizes)
        parts = draft.parts
        if any(part > cap for part, cap in zip(parts, caps, strict=True)):
            parts = filled(caps, [max(p, 1) for p in parts], WHOLE) or parts
        return Draft(draft.names, draft.samples, sizes, parts)

    def _simpler(self, best: OwnedPlan) -> OwnedPlan:
        """The same in small whole numbers, where that costs next to nothing."""
        draft = best.draft
        caps = self._caps(draft.names, draft.sizes)
        for parts in simple(draft.parts, caps, WHOLE):
            plan = self.plan_of(Draft(draft.names, draft.samples, draft.sizes, parts))
            cost = play_owned(self.model, plan)
            value = self.aim.value(cost.step_s, plan.devices)
            fits = all(b <= self._usable[n] for n, b in cost.memory_bytes.items())
            if fits and value <= best.value * (1 + _SIMPLER):
                return OwnedPlan(plan=plan, cost=cost, value=value, draft=draft)
        return best


def given_or_kept(job: Job) -> bool:
    """Whether the job says who takes part."""
    return job.batch_per_device is not None or job.keep_all


def _set(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])
