"""Seconds of a step where owners keep state in unequal parts: devices in lockstep with what is on the wire.

optimizer    F F B B │ gradients behind the last backward │ owners step │ parameters to all
gradients    F B→ F B→                                    │ owners step │ parameters to all
parameters   ⇢F ⇢B→ ⇢F ⇢B→                                │ owners step │

⇢  a layer's parameters come from their owners while the layer before computes     one thing at a time
→  a layer's gradients go to their owners while the next layers compute            on the wire
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from evener.core.buckets import fill_buckets
from evener.core.ownership import Handover, check_owners, handover
from evener.core.plan import Plan
from evener.cost.model import CostModel
from evener.cost.owned_memory import Owners, owners_of
from evener.cost.reduce import Holder, reduction_ends

Work = tuple[np.ndarray, np.ndarray]
"""(forward, backward) seconds by layer of one micro-batch; waiting for its data is part of the first."""


@dataclass(frozen=True, kw_only=True)
class OwnedCost:
    """A step with owners: seconds by device and cause (they add up to `step_s`), bytes by device.

    `gather_s` is what parameters take to all devices after the step, `held_s` by device and micro-batch what
    its forward and its backward take with all they wait for.
    """

    step_s: float
    compute_end_s: float
    seconds: dict[str, dict[str, float]]
    memory_bytes: dict[str, float]
    gather_s: float
    held_s: dict[str, tuple[tuple[float, float], ...]]


def play_owned(model: CostModel, plan: Plan) -> OwnedCost:
    """Price a plan with owners.

        step = overhead, compute and sums + the slowest owner's step + gather of what is kept whole

    Raises PlanMismatchError for owners that cannot be carried out. Example: 2 owners in equal parts, 1 s of
    compute each, 10 MB of gradients behind it and of parameters after it over 10 MB/s, an update of 0.2 s
    for all of the model: 1 + 0.5 + 0.1 + 0.5 = 2.1 s.
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
        self.rounds = max(len(s) for s in self.sizes)

    def work(self, device: int, size: int) -> Work:
        """Seconds by layer of a micro-batch of `size` samples."""
        kind = self.model.fleet.device(self.devices[device]).kind
        if not size:
            return (np.zeros(self.model.bytes.num_layers),) * 2
        forward, backward = self.model.layers(kind).seconds(size)
        step = self.model.step(kind)
        if step and step.input_s.any():
            forward = forward.copy()
            forward[0] += self.input_s(device, size)
        return forward, backward

    def input_s(self, device: int, size: int) -> float:
        """What a micro-batch waits for its data."""
        step = self.model.step(self.model.fleet.device(self.devices[device]).kind)
        return float(step.input_s[min(size, step.largest)]) if step else 0.0

    def overhead_s(self, device: int) -> float:
        """What a step costs whatever is in it."""
        step = self.model.step(self.model.fleet.device(self.devices[device]).kind)
        return (step.overhead_s if step else 0.0) + self.model.trainer.step_s

    def update_s(self, device: int) -> float:
        """The owner's step: its part of what the optimiser takes for the whole model."""
        name = self.devices[device]
        kind = self.model.fleet.device(name).kind
        step = self.model.step(kind)
        whole = step.update_s if step else float(self.model.layers(kind).update_s.sum())
        held = np.where(self.owners.level >= 1, self.owners.parts[name], 1.0) * self.owners.once
        return whole * float(held.sum()) / max(float(self.owners.once.sum()), 1.0)

    @cached_property
    def _handovers(self) -> tuple[dict[tuple[float, ...], Handover], dict[tuple[float, ...], Handover]]:
        """(to owners, from owners) by the parts of a layer in the order of devices."""
        both: tuple[dict, dict] = ({}, {})
        for layer in range(len(self.owners.once)):
            key = self._parts_of(layer)
            if key not in both[0] and any(key):
                parts = dict(zip(self.devices, key, strict=True))
                for adds, found in zip((True, False), both, strict=True):
                    found[key] = handover(parts, self.model.fleet, adds=adds)
        return both

    def _parts_of(self, layer: int) -> tuple[float, ...]:
        return tuple(float(self.owners.parts[d][layer]) for d in self.devices)

    def _to_owners(self, layer: int, num_bytes: float) -> float:
        if self.owners.level[layer] < 1:
            return self.model.network.all_reduce_s(self.devices, num_bytes)
        return self._handovers[0][self._parts_of(layer)].seconds(num_bytes)

    def _from_owners(self, layer: int, num_bytes: float) -> float:
        return self._handovers[1][self._parts_of(layer)].seconds(num_bytes) if num_bytes else 0.0

    def gather_s(self) -> float:
        """Parameters that every device keeps whole, from who stepped them, in buckets: nothing hides it."""
        wanted = np.where((self.owners.level >= 1) & (self.owners.level < 3), self.owners.once, 0.0)
        total = 0.0
        for bucket in fill_buckets([int(b) for b in wanted], self.model.trainer.bucket_bytes):
            total += self._from_owners(bucket[-1], float(wanted[bucket].sum()))
        return total

    def cost(self) -> OwnedCost:
        """Everything."""
        played = _Lockstep(
            rounds=[
                [self.work(d, s[r] if r < len(s) else 0) for d, s in enumerate(self.sizes)]
                for r in range(self.rounds)
            ],
            overhead_s=np.array([self.overhead_s(d) for d in range(len(self.devices))]),
            gather_s=np.array([self._from_owners(i, b) for i, b in enumerate(self.owners.gathers)]),
            scatter_s=np.array(
                [self._to_owners(i, b) if b else 0.0 for i, b in enumerate(self.owners.gradients)]
            ),
            often=self.owners.level >= 2,
        ).run()
        summed = self._summed(played) if (self.owners.level < 2).all() else played.wire_s
        updates = [self.update_s(d) for d in range(len(self.devices))]
        gather = self.gather_s()
        compute_end = float(played.ends_s.max())
        done = max(summed, compute_end)
        step = done + max(updates) + gather
        seconds = {}
        for d, name in enumerate(self.devices):
            reading = sum(self.input_s(d, size) for size in self.sizes[d])
            worked = sum(float(x.sum()) for size in self.sizes[d] for x in self.work(d, size)) - reading
            stalled = sum(played.held_s[r][d] for r in range(len(self.sizes[d]))) - worked - reading
            told = {
                "compute": worked,
                "input": reading,
                "optimizer": updates[d],
                "overhead": self.overhead_s(d),
                "transfer": max(stalled, 0.0) + gather,
                "reduce": done - compute_end,
            }
            seconds[name] = {**told, "wait": max(step - sum(told.values()), 0.0)}
        return OwnedCost(
            step_s=step,
            compute_end_s=compute_end,
            seconds=seconds,
            memory_bytes={
                name: self.owners.memory(name, max(sizes, default=0)).total
                for name, sizes in zip(self.devices, self.sizes, strict=True)
            },
            gather_s=gather,
            held_s={
                name: tuple(played.both_s[r][d] for r in range(len(self.sizes[d])))
                for d, name in enumerate(self.devices)
            },
        )

    def _summed(self, played: "_Played") -> float:
        """When the last gradients are with their owners, leaving in buckets during last backwards."""
        whole = (0, self.model.bytes.num_layers)
        holders = [
            Holder(
                device=name,
                span=whole,
                end_s=float(played.ends_s[d]),
                backward_s=self.work(d, self.sizes[d][-1] if self.sizes[d] else 0)[1],
            )
            for d, name in enumerate(self.devices)
        ]
        owned = int(self.owners.level.argmax())

        def sum_s(names: tuple[str, ...], num_bytes: float, lanes: int) -> float:
            return self._to_owners(owned, num_bytes)

        return reduction_ends(self.model.network, self.model.bytes, holders, sum_s)


@dataclass(frozen=True, kw_only=True)
class _Played:
    """By device: when its last backward ends; by round and device: seconds of its micro-batch, waits and all.

    `wire_s` is when the last gradients are with their owners.
    """

    ends_s: np.ndarray
    wire_s: float
    both_s: list[list[tuple[float, float]]]

    @property
    def held_s(self) -> list[list[float]]:
        """Forward and backward together."""
        return [[f + b for f, b in row] for row in self.both_s]


class _Lockstep:
    """Rounds of micro-batches; gathers and scatters one after another on the wire, all devices in each.

    A layer is gathered when the one before the last has been used everywhere, so that two are whole at once;
    the last two of a forward stay for the backward. A layer's backward waits until the gradients of the last
    but one have left. Devices that have no micro-batch in a round take part in what is sent.
    """

    def __init__(
        self,
        *,
        rounds: Sequence[Sequence[Work]],
        overhead_s: np.ndarray,
        gather_s: np.ndarray,
        scatter_s: np.ndarray,
        often: np.ndarray,
    ) -> None:
        self._rounds = rounds
        self._now = overhead_s.copy()
        self._gather_s, self._scatter_s, self._often = gather_s, scatter_s, often
        self._wire = 0.0

    def run(self) -> _Played:
        """All rounds. Equal ones after the second are as long as the one before them."""
        both: list[list[tuple[float, float]]] = []
        before: tuple[np.ndarray, float] | None = None
        for r, works in enumerate(self._rounds):
            begun = self._now.copy(), self._wire
            last = r == len(self._rounds) - 1
            two = self._rounds[max(r - 2, 0) : r]
            if before is not None and not last and len(two) == 2 and all(_same(works, x) for x in two):
                self._now, self._wire = self._now + before[0], self._wire + before[1]
                both.append(both[-1])
                continue
            self._forward(np.array([f for f, _ in works]))
            turned = self._now.copy()
            self._backward(np.array([b for _, b in works]), last=last)
            both.append(list(zip((turned - begun[0]).tolist(), (self._now - turned).tolist(), strict=True)))
            before = self._now - begun[0], self._wire - begun[1]
        return _Played(ends_s=self._now, wire_s=self._wire, both_s=both)

    def _gather(self, layer: int, asked_s: float) -> float:
        """When the layer is there; asked for by the last device at `asked_s`."""
        if self._gather_s[layer]:
            self._wire = max(self._wire, asked_s) + float(self._gather_s[layer])
            return self._wire
        return 0.0

    def _after(self, until_s: float) -> np.ndarray:
        return np.maximum(self._now, until_s)

    def _forward(self, forward: np.ndarray) -> None:
        used = [float(self._now.max())] * 2
        for k in range(forward.shape[1]):
            self._now = self._after(self._gather(k, used[-2])) + forward[:, k]
            used.append(float(self._now.max()))

    def _backward(self, backward: np.ndarray, *, last: bool) -> None:
        count = backward.shape[1]
        there = [0.0] * count
        sent = [0.0] * (count + 2)
        for k in reversed(range(count)):
            self._now = self._after(max(there[k], sent[k + 2])) + backward[:, k]
            done = float(self._now.max())
            if k > 1:
                there[k - 2] = self._gather(k - 2, done)
            if self._scatter_s[k] and (last or self._often[k]):
                self._wire = max(self._wire, done) + float(self._scatter_s[k])
                sent[k] = self._wire if self._often[k] else 0.0


def _same(a: Sequence[Work], b: Sequence[Work]) -> bool:
    return all(x[0] is y[0] or bool((x[0] == y[0]).all()) for x, y in zip(a, b, strict=True))
