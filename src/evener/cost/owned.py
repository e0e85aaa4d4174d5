"""Seconds of a step where owners keep state in unequal parts: each device with what it pulls and sends.

optimizer    ⇢F F B B │ gradients behind the last backward │ owners step
gradients    ⇢F B→ F B→                                    │ owners step
parameters   ⇢F ⇢B→ ⇢F ⇢B→                                 │ owners step

⇢  a unit's parameters come from their owners while the unit before computes; what every device keeps whole
   comes once, during the first forward
→  a unit's gradients go to their owners while the next units compute

An accelerator's way to its host and back is in `owned_copies`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from evener.core.ownership import Handover, check_owners, handover
from evener.core.plan import Plan
from evener.cost.model import CostModel
from evener.cost.owned_copies import Copies, copies_of
from evener.cost.owned_memory import Owners, owners_of
from evener.cost.reduce import Holder, reduction_ends

Work = tuple[np.ndarray, np.ndarray]
"""(forward, backward) seconds by layer of one micro-batch; waiting for its data is part of the first."""


@dataclass(frozen=True, kw_only=True)
class OwnedCost:
    """A step with owners: seconds by device and cause (they add up to `step_s`), bytes by device.

    By device and micro-batch, `gather_s` is what its forward and its backward wait for parameters.
    `summed_s` is when the last gradients are with their owners.
    """

    step_s: float
    compute_end_s: float
    summed_s: float
    seconds: dict[str, dict[str, float]]
    memory_bytes: dict[str, float]
    gather_s: dict[str, tuple[tuple[float, float], ...]]


def play_owned(model: CostModel, plan: Plan) -> OwnedCost:
    """Price a plan with owners.

        step = overhead, compute and what shows of gathers and sums + the slowest owner's step

    Raises PlanMismatchError for owners that cannot be carried out. Example: 2 owners in equal parts, one unit
    of 10 MB over 10 MB/s and 3 s of compute: 0.5 s until parameters are there, 3 s, 0.5 s of gradients behind
    it, half of an update of 0.1 s: 4.05 s.
    """
    check_owners(plan, [x.name for x in model.profile.layers])
    return _Step(model, plan).cost()


class _Step:
    """One step of `plan` on its devices, in their order."""

    def __init__(self, model: CostModel, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.devices = plan.devices
        self.owners: Owners = owners_of(model.profile, model.bytes, plan)
        self.sizes = [p.micro_batch_sizes for p in plan.pipelines]
        self._works: dict[tuple[str, int], Work] = {}
        is_owned = self.owners.level >= 1
        self.copies: dict[str, Copies] = copies_of(
            model.fleet,
            {d: self.owners.parts[d] for d in self.devices},
            np.where(is_owned, self.owners.once, 0.0),
            np.where(is_owned, self.owners.gradients, 0.0),
        )

    def work(self, device: int, size: int) -> Work:
        """Seconds by layer of a micro-batch of `size` samples."""
        kind = self._kind(device)
        if (kind, size) not in self._works:
            nothing = np.zeros(self.model.bytes.num_layers)
            forward, backward = self.model.layers(kind).seconds(size) if size else (nothing, nothing)
            reading = self.input_s(device, size)
            if reading:
                forward = np.concatenate([[forward[0] + reading], forward[1:]])
            self._works[kind, size] = forward, backward
        return self._works[kind, size]

    def _kind(self, device: int) -> str:
        return self.model.fleet.device(self.devices[device]).kind

    def input_s(self, device: int, size: int) -> float:
        """What a micro-batch waits for its data."""
        step = self.model.step(self._kind(device))
        return float(step.input_s[min(size, step.largest)]) if step else 0.0

    def overhead_s(self, device: int) -> float:
        """What a step costs whatever is in it."""
        step = self.model.step(self._kind(device))
        return (step.overhead_s if step else 0.0) + self.model.trainer.step_s

    def update_s(self, device: int) -> float:
        """The owner's step: its part of what the optimiser takes for the whole model, and its copies."""
        step = self.model.step(self._kind(device))
        whole = step.update_s if step else float(self.model.layers(self._kind(device)).update_s.sum())
        owners = self.owners
        held = np.where(owners.level >= 1, owners.parts[self.devices[device]], 1.0) * owners.once
        moves_s = whole * float(held.sum()) / max(float(owners.once.sum()), 1.0)
        return moves_s + self.copies[self.devices[device]].step_s

    @cached_property
    def _updates(self) -> np.ndarray:
        return np.array([self.update_s(d) for d in range(len(self.devices))])

    @cached_property
    def _handovers(self) -> dict[tuple[tuple[float, ...], bool], Handover]:
        return {}

    def _handover_s(self, unit: int, num_bytes: float, *, adds: bool) -> float:
        """Seconds of a buffer to a unit's owners (`adds`) or from them."""
        if not num_bytes:
            return 0.0
        if self.owners.level[unit] < 1:
            return self.model.network.all_reduce_s(self.devices, num_bytes)
        key = tuple(float(self.owners.parts[d][unit]) for d in self.devices), adds
        if key not in self._handovers:
            parts = dict(zip(self.devices, key[0], strict=True))
            self._handovers[key] = handover(parts, self.model.fleet, adds=adds)
        return self._handovers[key].seconds(num_bytes)

    def _played(self) -> "_Played":
        owners = self.owners
        copies = [self.copies[d] for d in self.devices]
        return _Play(
            rounds=[
                [self._by_unit(self.work(d, s[r] if r < len(s) else 0)) for d, s in enumerate(self.sizes)]
                for r in range(max(len(s) for s in self.sizes))
            ],
            rounds_of=np.array([len(s) for s in self.sizes]),
            begin_s=self._updates - self._updates.max() + [self.overhead_s(d) for d in range(len(copies))],
            ways=_Ways(
                gathered=owners.gathers > 0,
                scattered=owners.level >= 2,
                arrive_s=self._arrive_s(),
                gather_s=self._unit_seconds(owners.gathers, adds=False),
                scatter_s=self._unit_seconds(np.where(owners.level >= 2, owners.gradients, 0.0), adds=True),
                into_s=np.array([c.into for c in copies]),
                out_s=np.array([c.out for c in copies]),
            ),
            stays=owners.stays,
        ).run()

    def _arrive_s(self) -> np.ndarray:
        """When each unit that is kept whole is there, from the end of the slowest owner's step on."""
        owners = self.owners
        kept = np.where((owners.level >= 1) & (owners.level < 3), owners.once, 0.0)
        left = self._updates[:, None] - np.array([self.copies[d].left_s for d in self.devices])
        left -= self._updates.max()
        owns = np.array([owners.parts[d] for d in self.devices]) > 0
        left = np.where(owns, left, -np.inf)
        there_s, found = -np.inf, np.zeros(len(kept))
        for k, takes_s in enumerate(self._unit_seconds(kept, adds=False)):
            if kept[k]:
                there_s = found[k] = max(there_s, float(left[:, k].max())) + takes_s
        return found

    def _unit_seconds(self, num_bytes: np.ndarray, *, adds: bool) -> np.ndarray:
        return np.array([self._handover_s(u, float(b), adds=adds) for u, b in enumerate(num_bytes)])

    def _by_unit(self, work: Work) -> Work:
        return np.add.reduceat(work[0], self.owners.starts), np.add.reduceat(work[1], self.owners.starts)

    def cost(self) -> OwnedCost:
        """Everything."""
        played = self._played()
        whole_s = self._whole_out_s()
        played.ends_s[:] += whole_s.sum(axis=1)
        compute_end = float(played.ends_s.max())
        summed = max(compute_end, self._summed_s(played), float(played.wire_s.max()))
        step = summed + float(self._updates.max())
        seconds, gathers = {}, {}
        for d, name in enumerate(self.devices):
            alone = [tuple(float(x.sum()) for x in self.work(d, size)) for size in self.sizes[d]]
            waits = [
                (max(f - own_f, 0.0), max(b - own_b, 0.0))
                for (own_f, own_b), (f, b) in zip(alone, (row[d] for row in played.both_s), strict=False)
            ]
            if waits:
                waits[-1] = waits[-1][0], waits[-1][1] + float(whole_s[d].sum())
            reading = sum(self.input_s(d, size) for size in self.sizes[d])
            told = {
                "compute": sum(f + b for f, b in alone) - reading,
                "input": reading,
                "optimizer": float(self._updates[d]),
                "overhead": self.overhead_s(d),
                "transfer": sum(f + b for f, b in waits),
                "reduce": summed - compute_end,
            }
            seconds[name] = {**told, "wait": max(step - sum(told.values()), 0.0)}
            gathers[name] = tuple(waits)
        return OwnedCost(
            step_s=step,
            compute_end_s=compute_end,
            summed_s=summed,
            seconds=seconds,
            memory_bytes={
                name: self.owners.memory(name, max(sizes, default=0)).total
                for name, sizes in zip(self.devices, self.sizes, strict=True)
            },
            gather_s=gathers,
        )

    def _whole_out_s(self) -> np.ndarray:
        """By device and unit, copies of gradients that leave once, in the last backward."""
        once = self.owners.level == 1
        return np.array(
            [
                np.where(once & bool(self.sizes[d]), self.copies[n].out, 0.0)
                for d, n in enumerate(self.devices)
            ]
        )

    def _last_backward_s(self, device: int) -> np.ndarray:
        """By layer, the last backward with its copies, each at the first layer of its unit."""
        sizes = self.sizes[device]
        found = self.work(device, sizes[-1] if sizes else 0)[1].copy()
        found[self.owners.starts] += self._whole_out_s()[device]
        return found

    def _summed_s(self, played: "_Played") -> float:
        """When gradients that all devices keep whole are summed: in buckets, during last backwards."""
        if (self.owners.level >= 2).all():
            return 0.0
        holders = [
            Holder(
                device=name,
                span=(0, self.model.bytes.num_layers),
                end_s=float(played.ends_s[d]),
                backward_s=self._last_backward_s(d),
            )
            for d, name in enumerate(self.devices)
        ]
        unit = int(np.where(self.owners.level < 2, self.owners.once, -1.0).argmax())

        def sum_s(names: tuple[str, ...], num_bytes: float, lanes: int) -> float:
            return self._handover_s(unit, num_bytes, adds=True)

        return reduction_ends(self.model.network, self.model.bytes, holders, sum_s)


@dataclass(frozen=True, kw_only=True)
class _Played:
    """By device: when its last backward ends, when all is sent; (forward, backward) by round and device."""

    ends_s: np.ndarray
    wire_s: np.ndarray
    both_s: list[list[tuple[float, float]]]


@dataclass(frozen=True, kw_only=True)
class _Ways:
    """Seconds by unit: until what is kept whole came, of gathers and of gradients to owners; and copies of
    values into each device and of gradients out of it, by device and unit.

    Which units are gathered, and whose gradients leave in every backward, is not told by seconds: a wire may
    take none where copies do.
    """

    gathered: np.ndarray
    scattered: np.ndarray
    arrive_s: np.ndarray
    gather_s: np.ndarray
    scatter_s: np.ndarray
    into_s: np.ndarray
    out_s: np.ndarray


class _Play:
    """Rounds of micro-batches; each device pulls one thing after another and sends one after another.

    A unit is pulled when the one before the last has been used, so that two are whole at once; the last two
    of a forward stay for the backward. What `stays` is there before a forward begins. A unit's backward waits
    until the gradients of the last but one have left.
    """

    def __init__(
        self,
        *,
        rounds: Sequence[Sequence[Work]],
        rounds_of: np.ndarray,
        begin_s: np.ndarray,
        ways: _Ways,
        stays: np.ndarray,
    ) -> None:
        self._rounds, self._rounds_of, self._ways = rounds, rounds_of, ways
        self._now = begin_s.copy()
        gathered = np.flatnonzero(ways.gathered)
        self._stays = [int(k) for k in gathered if stays[k]]
        self._comes = [int(k) for k in gathered if not stays[k]]
        self._again = [k for k in self._comes if k not in gathered[-2:]]  # in the backward
        handed_in_s = max(ways.arrive_s.max(initial=0.0), begin_s.max())  # by the slowest owner
        self._pulled = np.where(rounds_of > 0, handed_in_s, 0.0)
        self._sent = np.zeros(len(begin_s))

    def run(self) -> _Played:
        """All rounds. After two alike, more of the same take as long as the last of them."""
        both: list[list[tuple[float, float]]] = []
        before = None
        for r, works in enumerate(self._rounds):
            two = self._rounds[max(r - 2, 1) : r]
            if before is not None and len(two) == 2 and all(_same(works, x) for x in two):
                self._now, self._pulled, self._sent = (
                    x + more for x, more in zip((self._now, self._pulled, self._sent), before, strict=True)
                )
                both.append(both[-1])
                continue
            begun = self._now, self._pulled, self._sent
            at = self._rounds_of > r
            self._forward(np.array([f for f, _ in works]), at, first=r == 0)
            turned = self._now
            self._backward(np.array([b for _, b in works]), at)
            both.append(list(zip((turned - begun[0]).tolist(), (self._now - turned).tolist(), strict=True)))
            now = self._now, self._pulled, self._sent
            before = tuple(x - then for x, then in zip(now, begun, strict=True))
        return _Played(ends_s=self._now, wire_s=self._sent, both_s=both)

    def _pull(self, unit: int, at: np.ndarray) -> np.ndarray:
        """When the unit's parameters are there, asked for now by the devices of `at`."""
        done = np.maximum(self._pulled, self._now) + self._ways.gather_s[unit]
        self._pulled = np.where(at, done, self._pulled)
        return np.where(at, done, 0.0)

    def _send(self, unit: int, at: np.ndarray) -> np.ndarray:
        """When the unit's gradients have left."""
        done = np.maximum(self._sent, self._now) + self._ways.scatter_s[unit]
        self._sent = np.where(at, done, self._sent)
        return np.where(at, done, 0.0)

    def _forward(self, forward: np.ndarray, at: np.ndarray, *, first: bool) -> None:
        count = forward.shape[1]
        ways = self._ways
        there = [np.where(at & first, ways.arrive_s[k], 0.0) for k in range(count)]
        into = [np.where(at & (first | (k in self._comes)), ways.into_s[:, k], 0.0) for k in range(count)]
        for k in self._stays:
            self._now = np.maximum(self._now, self._pull(k, at)) + np.where(at, ways.into_s[:, k], 0.0)
            into[k] = np.zeros(len(at))
        asked = iter(self._comes)
        for k in range(count):
            for _ in range((k == 0) + (k in self._comes)):  # two are whole: k, and the one behind it
                ahead = next(asked, None)
                if ahead is not None:
                    there[ahead] = self._pull(ahead, at)
            self._now = np.maximum(self._now, there[k]) + into[k] + forward[:, k]

    def _backward(self, backward: np.ndarray, at: np.ndarray) -> None:
        count, ways = backward.shape[1], self._ways
        nothing = np.zeros(len(self._now))
        there = dict.fromkeys(range(count), nothing)
        sent = dict.fromkeys(range(count + 2), nothing)
        before = dict(itertools.pairwise(reversed(self._comes)))
        for k in reversed(range(count)):
            if before.get(k) in self._again:
                there[before[k]] = self._pull(before[k], at)
            self._now = np.maximum(self._now, np.maximum(there[k], sent[k + 2]))
            if k in self._again:
                self._now = self._now + np.where(at, ways.into_s[:, k], 0.0)
            self._now = self._now + backward[:, k]
            if ways.scattered[k]:
                self._now = self._now + np.where(at, ways.out_s[:, k], 0.0)
                sent[k] = self._send(k, at)


def _same(a: Sequence[Work], b: Sequence[Work]) -> bool:
    return all(x[0] is y[0] or bool((x[0] == y[0]).all()) for x, y in zip(a, b, strict=True))
