"""What owners change in a plan of stages: who steps and keeps less, and what goes to owners and back.

step      its part of the update │ overhead │ F0 F1 ..   a stage's first forward waits for its layers' values
sums      each set of holders to the owners among them, behind the last backward
gradients, where they are in parts, leave after every backward: one that takes longer than its micro-batch
          keeps the next one waiting
copies    of an accelerator to its host and back lengthen what they are behind, see `owned_copies`
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from evener.core.ownership import Handover, handover, held_by, holders_of, owned_parts, units_of
from evener.core.plan import HELD, Plan
from evener.core.routes import Routes, StageRoute
from evener.cost.memory import ModelBytes
from evener.cost.model import CostModel
from evener.cost.owned_copies import Copies, copies_of
from evener.schedules.costs import Costs


@dataclass(frozen=True, kw_only=True)
class StagedOwners:
    """The owners of a plan that cuts the model; layers that none is named for are held as ever."""

    model: CostModel
    plan: Plan

    @cached_property
    def keeps_gradients(self) -> bool:
        """Whether gradients are in parts as well."""
        return HELD.index(held_by(self.plan) or "optimizer") >= 1

    @cached_property
    def parts(self) -> list[dict[str, float]]:
        """By layer, the part of 1 of each owner; empty for a layer without. Tied ones go with the first."""
        named = {o.layer: owned_parts(o) for o in self.plan.owners}
        found = [named.get(x.name, {}) for x in self.model.profile.layers]
        for first, places in self.model.bytes.tied.items():
            found = [found[first] if i in places else row for i, row in enumerate(found)]
        return found

    @cached_property
    def holders(self) -> list[frozenset[str]]:
        """By layer, the devices that sum its gradient; tied layers are summed with the first of them."""
        held = holders_of(self.plan)
        names = [x.name for x in self.model.profile.layers]
        return [
            frozenset(d for j in self.model.bytes.tied.get(i, (i,)) for d in held[names[j]])
            for i in range(len(names))
        ]

    def kept(self, device: str) -> np.ndarray:
        """By layer, what `device` keeps and steps of it, if it has it. Example: 0.25 of one in parts 3:1."""
        return np.array([row.get(device, 0.0) if row else 1.0 for row in self.parts])

    def bytes_of(self, device: str, *, gradients: bool = True) -> ModelBytes:
        """The model's bytes where `device` keeps its parts, of gradients nothing where they are elsewhere."""
        data, kept = self.model.bytes, self.kept(device)
        sent = kept if gradients else np.where([bool(row) for row in self.parts], 0.0, 1.0)
        return replace(
            data,
            optimizer=_scaled(data.optimizer, kept),
            update=_scaled(data.update, kept),
            gradients=_scaled(data.gradients, sent) if self.keeps_gradients else data.gradients,
        )

    def spared(self, device: str, layers: Sequence[int]) -> float:
        """Bytes that `device` does not keep of these layers. Example: 3 of 4 parts of 200: 150."""
        whole, own = self.model.bytes, self.bytes_of(device)
        names = ("optimizer", "gradients")
        rows = [np.diff(getattr(whole, name)) - np.diff(getattr(own, name)) for name in names]
        return float(sum(row[list(layers)].sum() for row in rows))

    def owned_bytes(self) -> dict[str, int]:
        """Bytes by device that owners keep of what is in parts. Example: half of 400 bytes of state: 200."""
        data = self.model.bytes
        sums = data.optimizer + data.gradients if self.keeps_gradients else data.optimizer
        sizes, owned = np.diff(sums), np.array([bool(row) for row in self.parts])
        return {d: int((sizes * self.kept(d))[owned].sum()) for d in self.plan.devices}

    def update_s(self, device: str, layers: Sequence[int]) -> float:
        """The optimiser's time over what `device` keeps of these layers."""
        kind, at = self.model.fleet.device(device).kind, list(layers)
        step, kept = self.model.step(kind), self.kept(device)[at]
        if step and len(at) == self.model.bytes.num_layers:
            sizes = np.diff(self.model.bytes.optimizer)
            return step.update_s * float((sizes * kept).sum()) / max(float(sizes.sum()), 1.0)
        return float((self.model.layers(kind).update_s[at] * kept).sum())

    def sum_s(self, names: tuple[str, ...], num_bytes: float, degree: int) -> float:
        """Seconds of a buffer of gradients of the layers that `names` hold, to their owners or all alike."""
        parts, owned = self._of_set(frozenset(names))
        there = self._handover(parts, adds=True).seconds(owned * num_bytes) if owned else 0.0
        rest = (1 - owned) * num_bytes
        return there + (self.model.network.all_reduce_s(names, rest, degree) if rest > 0 else 0.0)

    def units(self, route: StageRoute) -> list[tuple[int, Handover, Handover, float]]:
        """(first layer, to owners, from owners, bytes) of what a stage sends as one, in the model's order."""
        first, last = self.model.span(route.stage)
        layers = self.model.profile.layers
        named = {o.layer: o for o in self.plan.owners}
        sizes = {layers[i].name: int(self.model.bytes.summed[i]) for i in range(first, last)}
        ordered = [named[n] for n in sizes if n in named and len(self.holders[self.model.places[n]]) > 1]
        found = []
        for unit in units_of(ordered, sizes, self.model.bytes.bucket_bytes):
            at = self.model.places[unit[0].layer]
            parts = {d: owned_parts(unit[0]).get(d, 0.0) for d in sorted(self.holders[at])}
            num_bytes = float(sum(sizes[o.layer] for o in unit))
            to, back = (self._handover(tuple(parts.items()), adds=adds) for adds in (True, False))
            found.append((at, to, back, num_bytes))
        return found

    def copies(self, route: StageRoute) -> dict[str, Copies]:
        """What each device of a stage copies of the units that it sends as one; nothing without any."""
        units = self.units(route)
        sizes = np.array([size for *_, size in units])
        holders = dict.fromkeys(d for _, to, _, _ in units for d, _ in to.parts)
        rows = [dict(to.parts) for _, to, _, _ in units]
        parts = {d: np.array([row.get(d, 0.0) for row in rows]) for d in holders}
        return copies_of(self.model.fleet, parts, sizes, sizes)

    @cached_property
    def _handovers(self) -> dict[tuple[tuple[tuple[str, float], ...], bool], Handover]:
        return {}

    def _handover(self, parts: tuple[tuple[str, float], ...], *, adds: bool) -> Handover:
        if (parts, adds) not in self._handovers:
            self._handovers[parts, adds] = handover(dict(parts), self.model.fleet, adds=adds)
        return self._handovers[parts, adds]

    @cached_property
    def _sets(self) -> dict[frozenset[str], tuple[tuple[tuple[str, float], ...], float]]:
        return {}

    def _of_set(self, devices: frozenset[str]) -> tuple[tuple[tuple[str, float], ...], float]:
        """(mean parts of the layers that exactly `devices` sum, by bytes; the part of them with owners)."""
        if devices not in self._sets:
            at = [i for i, held in enumerate(self.holders) if held == devices]
            sizes = self.model.bytes.summed
            owned = [i for i in at if self.parts[i]]
            whole = float(sizes[owned].sum())
            parts = {
                d: sum(float(sizes[i]) * self.parts[i].get(d, 0.0) for i in owned) / max(whole, 1.0)
                for d in sorted(devices)
            }
            self._sets[devices] = tuple(parts.items()), whole / max(float(sizes[at].sum()), 1.0)
        return self._sets[devices]


def in_stages(model: CostModel, plan: Plan, costs: Costs) -> Costs:
    """`costs` of a plan of stages with what its owners change, sums apart: they were priced by `sum_s`.

    Example: two devices with all of a layer's state on the first: the second's update takes nothing, and its
    first forward waits until the first has stepped and sent the values.
    """
    owners, routes = StagedOwners(model=model, plan=plan), Routes(plan)
    held = {d: layers_of(model, routes, d) for d in routes.devices}
    copies = {route.number: owners.copies(route) for route in routes.stages}
    updates = {
        d: owners.update_s(d, layers)
        + sum(copies[r.number][d].step_s for r in routes.stages if d in r.devices and copies[r.number])
        for d, layers in held.items()
    }
    costs = replace(
        costs,
        update_s=updates,
        memory={
            d: replace(m, fixed_bytes=m.fixed_bytes - owners.spared(d, held[d]))
            for d, m in costs.memory.items()
        },
    )
    return replace(costs, gather_s=_waits(owners, routes, costs, copies))


def layers_of(model: CostModel, routes: Routes, device: str) -> list[int]:
    """The layers that `device` holds, each once."""
    spans = [model.span(r.stage) for r in routes.stages if device in r.devices]
    return sorted({i for first, last in spans for i in range(first, last)})


def _waits(
    owners: StagedOwners, routes: Routes, costs: Costs, copies: Mapping[int, Mapping[str, Copies]]
) -> dict[tuple[int, str, str, int], float]:
    """What forwards wait for values, backwards for gradients of the one before to be gone, and copies."""
    found: dict[tuple[int, str, str, int], float] = {}
    ready_s = 0.0  # when the stage before has done its first micro-batch, and sent it
    for route in routes.stages:
        units = owners.units(route)
        ends = []
        for d in route.devices:
            numbers = [m for m in range(len(route.sizes)) if routes.samples(route.number, d, m)]
            if not numbers:
                continue
            lead_s = sum(costs.lead_s(d))
            begin_s = max(lead_s, 0.0 if route.is_first else ready_s)
            samples = routes.samples(route.number, d, numbers[0])
            forward_s = costs.action_s(route.number, d, "F", samples)
            shown_s = _shown_s(owners, costs, route, d, begin_s, samples, copies[route.number])
            if shown_s > 0:
                found[route.number, d, "F", numbers[0]] = shown_s
            out_s = float(copies[route.number][d].out.sum()) if units else 0.0
            if out_s:
                leave = numbers if owners.keeps_gradients else numbers[-1:]
                found |= {(route.number, d, "B", m): out_s for m in leave}
            if owners.keeps_gradients:
                sent_s = sum(to.seconds(size) for _, to, _, size in units)
                both_s = forward_s + costs.action_s(route.number, d, "B", samples) + out_s
                for m in numbers[1:] if sent_s > both_s else ():
                    found[route.number, d, "B", m] = out_s + sent_s - both_s
            ends.append(begin_s + shown_s + forward_s)
        sends = [
            costs.wire(p.source, p.target)
            for p in (routes.forward_pieces(route.number, 0) if route.sizes else ())
            if p.source != p.target
        ]
        size = costs.output_bytes.get(route.number, 0.0) * (route.sizes[0] if route.sizes else 0)
        ready_s = max(ends, default=ready_s) + max(
            (w.occupied_s(size) + w.latency_s for w in sends), default=0
        )
    return found


def _shown_s(
    owners: StagedOwners,
    costs: Costs,
    route: StageRoute,
    device: str,
    begin_s: float,
    samples: int,
    copies: Mapping[str, Copies],
) -> float:
    """How long a forward that begins at `begin_s` waits for values, which come unit by unit."""
    first, _ = owners.model.span(route.stage)
    forward = owners.model.layers(owners.model.fleet.device(device).kind).seconds(samples)[0]
    there_s, shown_s = 0.0, 0.0
    for k, (at, _, back, size) in enumerate(owners.units(route)):
        left_s = max(costs.update_s[d] - float(copies[d].left_s[k]) for d, part in back.parts if part > 0)
        there_s = max(there_s, left_s) + back.seconds(size)
        shown_s = max(shown_s, there_s - begin_s - float(forward[first:at].sum()))
        shown_s += float(copies[device].into[k])
    return shown_s


def _scaled(sums: np.ndarray, kept: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], (np.diff(sums) * kept).cumsum()])
