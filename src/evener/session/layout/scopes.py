"""What masks and statistics of each micro-batch depend on: keys by position, waves with wires of their own.

    layer   wave 0           wave 1           wave 2      wires: one for (a, b), made before the first step;
    bn1     a 4, b 2 samples a 4, b 2 samples a 2         wave 2 is a's alone, which then leads in bn1

Groups of processes are made for waves alone: gradients on the same one would be taken for statistics.
"""

from collections.abc import Callable, Mapping, Sequence

from evener.core.order import positions
from evener.core.routes import Routes
from evener.core.seams import Wire
from evener.runtime.batchnorm import WireOf, hand_out_statistics, wave, wave_layers
from evener.runtime.dropout import dropout_keys, keyed_layers
from evener.runtime.holding import Holding
from evener.runtime.ranks import Ranks
from evener.runtime.scope import Scope, ScopeOf

Norms = Mapping[int, Sequence[str]]  # by stage, its BatchNorm layers that take part in waves
RangeOf = Callable[[int, int], tuple[int, int]]
Connect = Callable[[tuple[str, ...]], Wire]


def wave_members(routes: Routes, norms: Norms) -> dict[tuple[str, int], tuple[str, ...]]:
    """By layer and number of the wave, the devices that have samples in it, in the order of the plan.

    Example: pipelines of 6 and 2 samples in micro-batches of 2 meet in wave 0; waves 1 and 2 are the first's.
    """
    found: dict[tuple[str, int], set[str]] = {}
    for route in routes.stages:
        for m in range(len(route.sizes)):
            there = {d for d in route.devices if routes.samples(route.number, d, m)}
            for name in norms.get(route.number, ()):
                found.setdefault((name, m), set()).update(there)
    return {key: tuple(d for d in routes.devices if d in there) for key, there in found.items()}


def wave_holders(routes: Routes, norms: Norms) -> dict[str, tuple[str, ...]]:
    """By layer, the devices that hold it, in the order of the plan."""
    held: dict[str, set[str]] = {}
    for route in routes.stages:
        for name in norms.get(route.number, ()):
            held.setdefault(name, set()).update(route.devices)
    return {name: tuple(d for d in routes.devices if d in there) for name, there in held.items()}


class Scopes:
    """The scopes of this device's micro-batches, and who has the running statistics of all waves so far."""

    def __init__(self, holding: Holding, norms: Norms, ranks: Ranks, connect: Connect) -> None:
        self.here = ranks.here
        self._norms, self._connect = norms, connect
        self._keyed = {stage: keyed_layers(part.module) for stage, part in holding.parts.items()}
        self._waves = {stage: wave_layers(part.module) for stage, part in holding.parts.items()}
        self._wires: dict[tuple[str, ...], Wire] = {}
        self._members: dict[int, dict[tuple[str, int], tuple[str, ...]]] = {}
        self._holders: dict[str, tuple[str, ...]] = {}
        self._leaders: dict[str, str] = {}

    def open(self, routes_of: Callable[[int], Routes], sizes: Sequence[int]) -> None:
        """Connect who meets in steps of `sizes` samples; called by all devices together."""
        self._members = {n: wave_members(routes_of(n), self._norms) for n in sizes}
        self._holders = wave_holders(routes_of(sizes[0]), self._norms)
        groups = [g for table in self._members.values() for g in table.values()]
        for devices in dict.fromkeys([*groups, *self._holders.values()]):
            if len(devices) > 1 and devices not in self._wires:
                self._wires[devices] = self._connect(devices)

    def begin_step(self, number: int, routes: Routes, range_of: RangeOf | None = None) -> ScopeOf:
        """The scopes of step `number`; called by all devices together.

        `range_of(stage, micro_batch)` says where in the global batch a micro-batch lies; `routes` do without
        it.

        A device that was in all waves up to now and misses one in this step first tells its statistics.
        """
        samples = routes.plan.global_batch
        there = self._in_all_waves(samples)
        self._hand_out([name for name, leader in self._leaders.items() if leader not in there[name]])
        for name, devices in there.items():
            self._leaders.setdefault(name, devices[0])

        def scope_of(stage: int, micro_batch: int) -> Scope:
            scope = Scope()
            if self._keyed[stage]:
                found = range_of(stage, micro_batch) if range_of else None
                mine = range(*(found or positions(routes, stage, self.here, micro_batch)))
                scope.keys = dropout_keys(self._keyed[stage], number, mine)
            if self._members[
                samples
            ]:  # also where a stage has no BatchNorm: others pass through its gradients
                scope.wave = wave(self._waves[stage], self._wire_of(samples, micro_batch))
            return scope

        return scope_of

    def hand_out(self) -> None:
        """Every holder of a layer gets its running statistics; called by all devices together."""
        self._hand_out(list(self._leaders))

    @property
    def pooled(self) -> frozenset[str]:
        """The layers whose statistics are those of waves, and equal on all holders after `hand_out`."""
        return frozenset(name for names in self._norms.values() for name in names)

    @property
    def leaders(self) -> dict[str, str]:
        """By layer, the one device that has the statistics of all waves; absent where all have them."""
        return dict(self._leaders)

    def _hand_out(self, names: Sequence[str]) -> None:
        layers = {layer.name: layer for held in self._waves.values() for layer in held}
        for name in names:
            leader = self._leaders[name]
            if name in layers and len(self._holders[name]) > 1:
                hand_out_statistics([layers[name]], self._wire_to_holders, leads=leader == self.here)
            del self._leaders[name]  # only now: a device may be lost meanwhile

    def _wire_to_holders(self, name: str) -> Wire:
        return self._wires[self._holders[name]]

    def _in_all_waves(self, samples: int) -> dict[str, list[str]]:
        """The largest share of the pipeline with most micro-batches is there for every layer."""
        there: dict[str, list[str]] = {}
        for (name, _), devices in self._members[samples].items():
            there[name] = [d for d in there.get(name, devices) if d in devices]
        return there

    def _wire_of(self, samples: int, micro_batch: int) -> WireOf:
        members = self._members[samples]
        return lambda name: self._wires.get(members[name, micro_batch])
