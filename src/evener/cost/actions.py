"""From a plan, a fleet and a profile to the numbers a schedule is played with."""

from dataclasses import dataclass, field

import numpy as np

from evener.core.buckets import BUCKET_BYTES, fill_buckets
from evener.core.fleet import Device
from evener.core.plan import Plan
from evener.core.routes import Routes, StageRoute
from evener.cost.exchange import sums_of
from evener.cost.memory import usable_bytes
from evener.cost.model import CostModel
from evener.cost.overlap import pieces_of
from evener.cost.owned_actions import owned_costs
from evener.cost.owned_stages import StagedOwners, in_stages
from evener.cost.resident_memory import resident_peak
from evener.cost.residing import in_words, resident
from evener.schedules.costs import Costs, Memory, Reduction, Wire

HALF = 0.5
"""Part of a backward taken as its weight part, one of two matrix products: no profile holds it."""


def plan_costs(model: CostModel, plan: Plan, *, memory_margin: float = 0.1) -> Costs:
    """The seconds and bytes of `plan` by `model`'s tables.

    Memory limits are `usable_bytes`. `notes` and `split_note` name every assumption: pairs without a link
    (they cost nothing), and how backward splits. Errors of the tables (unknown kind, missing layer, far
    outside) pass through.
    """
    if plan.owners and plan.is_data_parallel:
        limits = {name: _limit_bytes(model.fleet.device(name), memory_margin) for name in plan.devices}
        return owned_costs(model, plan, limits)
    made = _Conversion(model=model, routes=Routes(plan))
    costs = Costs(
        compute_s=made.compute_s(),
        output_bytes={r.number: float(model.bytes.output[made.span(r)[1] - 1]) for r in made.routes.stages},
        wires=made.wires(),
        reductions=made.reductions(),
        input_s=made.input_s(),
        update_s={d: made.update_s(d) for d in made.routes.devices},
        overhead_s={d: made.overhead_s(d) for d in made.routes.devices},
        memory={d: made.memory(d, memory_margin) for d in made.routes.devices},
        notes=tuple(made.notes),
        split_note=f"I and W are taken to be {1 - HALF:.0%} and {HALF:.0%} of a backward (assumed)",
    )
    return in_stages(model, plan, costs) if plan.owners else costs


@dataclass(kw_only=True)
class _Conversion:
    model: CostModel
    routes: Routes
    notes: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan = self.routes.plan
        owners = StagedOwners(model=self.model, plan=plan) if plan.owners else None
        self.sum_s = owners.sum_s if owners else sums_of(self.model.network, plan)

    def span(self, route: StageRoute) -> tuple[int, int]:
        return self.model.span(route.stage)

    def device(self, name: str) -> Device:
        return self.model.fleet.device(name)

    def degree(self, route: StageRoute, name: str) -> int:
        """Devices of the tensor-parallel group that `name` is in; 1 when alone."""
        return next(len(s.devices) for s in route.stage.shares if name in s.devices)

    def _leader(self, stage: int, name: str) -> str:
        """The first device of the group that `name` is in."""
        return next(s.devices[0] for s in self.routes.stages[stage].stage.shares if name in s.devices)

    def holdings(self, name: str) -> list[StageRoute]:
        return [r for r in self.routes.stages if name in r.devices]

    def compute_s(self) -> dict[tuple[int, str, str, int], float]:
        found: dict[tuple[int, str, str, int], float] = {}
        for route in self.routes.stages:
            first, last = self.span(route)
            for name in route.devices:
                table = self.model.layers(self.device(name).kind, self.degree(route, name))
                for samples in self._sizes(route, name):
                    forward, backward = (float(x[first:last].sum()) for x in table.seconds(samples))
                    again = forward if route.stage.recompute else 0.0
                    if route.stage.residence:
                        told = resident(self.model, route.stage, name, samples)
                        forward, backward, again = told.forward_s, told.backward_s, 0.0
                    weight = HALF * backward
                    seconds = {
                        "F": forward,
                        "B": backward + again,
                        "I": backward - weight + again,
                        "W": weight,
                    }
                    found |= {(route.number, name, kind, samples): s for kind, s in seconds.items()}
        return found

    def _sizes(self, route: StageRoute, name: str) -> set[int]:
        sizes = {self.routes.samples(route.number, name, m) for m in range(len(route.sizes))}
        return sizes - {0}

    def input_s(self) -> dict[tuple[int, str, int], float]:
        found = {}
        for route in self.routes.stages:
            for name in route.devices if route.is_first else ():
                step = self.model.step(self.device(name).kind)
                for samples in self._sizes(route, name) if step else ():
                    assert step is not None
                    found[route.number, name, samples] = float(step.input_s[min(samples, step.largest)])
        return found

    def update_s(self, name: str) -> float:
        """The optimiser's time over the layers that `name` holds, each once."""
        kind = self.device(name).kind
        step = self.model.step(kind)
        held: dict[int, float] = {}
        on_host = 0.0
        for route in self.holdings(name):
            first, last = self.span(route)
            if route.stage.residence:
                samples = max(self._sizes(route, name), default=1)
                told = resident(self.model, route.stage, name, samples)
                on_host += told.update_s
                continue
            degree = self.degree(route, name)
            if step and degree == 1 and last - first == self.model.bytes.num_layers:
                return step.update_s
            table = self.model.layers(kind, degree).update_s
            held |= {i: float(table[i]) for i in range(first, last)}
        return sum(held.values()) + on_host

    def overhead_s(self, name: str) -> float:
        step = self.model.step(self.device(name).kind)
        fixed = (step.overhead_s if step else 0.0) + self.model.trainer.step_s
        for route in self.holdings(name):
            if route.stage.residence:
                told = resident(self.model, route.stage, name, max(self._sizes(route, name), default=1))
                fixed += told.first_s
                self.notes[in_words(told, route.stage, name)] = None
                continue
            last = len(route.sizes) - 1
            samples = self.routes.samples(route.number, name, last) if route.sizes else 0
            fixed += self.model.rows_s(name, self.span(route), samples)
        return fixed

    def wires(self) -> dict[tuple[str, str], Wire]:
        pairs = {
            (p.source, p.target)
            for r in self.routes.stages
            for m in range(len(r.sizes))
            for p in self.routes.forward_pieces(r.number, m) + self.routes.backward_pieces(r.number, m)
            if p.source != p.target
        }
        found = {}
        for a, b in sorted(pairs):
            link = self.model.fleet.link(a, b)
            if link is None:
                self.notes[f"no link between {a} and {b}: sending is taken to cost nothing"] = None
            way = f"{self.device(a).host}>{self.device(b).host}"  # a bus carries both directions at once
            bus = f"{link.bus} {way}" if link and link.bus else None
            found[a, b] = Wire(curve=link.curve if link else None, bus=bus)
        return found

    def reductions(self) -> tuple[Reduction, ...]:
        """Runs of layers with the same holders, from the end of the chain, in buckets; tied layers as one."""
        holders = [self._holders(i) for i in range(self.model.bytes.num_layers)]
        found, last = [], len(holders)
        while last > 0:
            first = last - 1
            while first > 0 and holders[first - 1] == holders[first]:
                first -= 1
            if len({self._leader(stage, d) for stage, d in holders[first]}) > 1:
                found.append(self._reduction(first, last, holders[first]))
            last = first
        return tuple(found)

    def _holders(self, layer: int) -> tuple[tuple[int, str], ...]:
        """(stage, device) that hold a layer; the first of tied ones is held by the holders of all."""
        wanted = self.model.bytes.tied.get(layer, (layer,))
        return tuple(
            (r.number, d)
            for r in self.routes.stages
            if any(self.span(r)[0] <= i < self.span(r)[1] for i in wanted)
            for d in r.devices
        )

    def _reduction(self, first: int, last: int, holders: tuple[tuple[int, str], ...]) -> Reduction:
        """A tensor-parallel group's devices each sum their part, at once: its first stands for all."""
        degree = min(self.degree(self.routes.stages[stage], name) for stage, name in holders)
        leaders = tuple(dict.fromkeys(self._leader(stage, name) for stage, name in holders))
        sizes = self.model.bytes_at(degree).summed
        ready = [self._ready(stage, name) for stage, name in holders]
        pieces = []
        for bucket in fill_buckets([int(sizes[i]) for i in range(first, last)], BUCKET_BYTES):
            layers = [first + i for i in bucket]
            num_bytes = float(sizes[layers].sum())
            count = pieces_of(num_bytes) if num_bytes else 0
            for part in range(count):
                done = [
                    row[layers[-1] + 1] + (row[layers[-1]] - row[layers[-1] + 1]) * (part + 1) / count
                    if count > 1
                    else row[layers[-1]]
                    for row in ready
                ]
                seconds = float(self.sum_s(leaders, num_bytes / count, degree))
                pieces.append((seconds, tuple(map(float, done))))
        names = tuple(layer.name for layer in self.model.profile.layers[first:last])
        return Reduction(layers=names, holders=holders, pieces=tuple(pieces))

    def _ready(self, stage: int, name: str) -> np.ndarray:
        """The part of the stage's last backward after which each layer's gradient is there; before it is what
        the stage recomputes.
        """
        route = self.routes.stages[stage]
        first, last = self.span(route)
        samples = self.routes.samples(stage, name, len(route.sizes) - 1) if route.sizes else 0
        ready = np.ones(self.model.bytes.num_layers + 1)
        if samples:
            table = self.model.layers(self.device(name).kind, self.degree(route, name))
            forward, backward = (x[first:last] for x in table.seconds(samples))
            again = forward.sum() if route.stage.recompute else 0.0
            done = again + np.concatenate([[0.0], backward[::-1].cumsum()])[::-1]
            ready[first : last + 1] = done / done[0]
        return ready

    def memory(self, name: str, margin: float) -> Memory:
        device = self.device(name)
        held: dict[int, float] = {}
        fixed, saved = 0.0, {}
        for route in self.holdings(name):
            first, last = self.span(route)
            if route.stage.residence:
                samples = max(self._sizes(route, name), default=0)
                one, two = (self._resident_bytes(route, samples, n) for n in (1, 2))
                saved[route.number] = (two - one) / max(samples, 1)
                fixed += one - (two - one)
                continue
            tables = self.model.bytes_at(self.degree(route, name))
            held |= {i: float(tables.fixed(np.int64(i), i + 1)) for i in range(first, last)}
            none, one = (
                float(tables.per_sample(np.int64(first), last, n, recompute=route.stage.recompute))
                for n in (0, 1)
            )
            saved[route.number] = one - none
            fixed += none * max(self._sizes(route, name), default=0)
        fixed += sum(held.values())
        return Memory(limit_bytes=_limit_bytes(device, margin), fixed_bytes=fixed, saved_bytes=saved)

    def _resident_bytes(self, route: StageRoute, samples: int, in_flight: int) -> float:
        return resident_peak(
            self.model.bytes,
            list(self.model.places),
            self.span(route),
            samples,
            in_flight,
            str(route.stage.residence),
            recompute=route.stage.recompute,
        )


def _limit_bytes(device: Device, margin: float) -> float | None:
    usable = usable_bytes(device, margin)
    return usable if usable < float("inf") else None
