"""Who can run one stage, and how long every run of layers takes them: tables for the search."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evener.core.plan import RESIDENCES
from evener.core.residence import host_disk, host_room
from evener.core.split import apportion
from evener.cost.communication import shares_send_s
from evener.cost.evaluate import CostModel
from evener.cost.layers import LayerCost
from evener.cost.resident_memory import resident_peaks
from evener.cost.residing import resident_tables
from evener.planner.groups import Group

_ALL_SPLITS = 40
PLACES = (None, *RESIDENCES)
Block = tuple[int, ...]
"""Groups (by number, sorted) whose devices share one stage: (0, 0, 2) is two of group 0, one of group 2."""


@dataclass(frozen=True, kw_only=True)
class StageTable:
    """Seconds and choices of one block by layers i..j-1, for one micro-batch size; infinite where none
    fits.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    split: np.ndarray
    recompute: np.ndarray
    residence: np.ndarray
    splits: tuple[tuple[int, ...], ...]

    def choices(self, i: int, j: int) -> dict[str, Any]:
        """What a stage of layers i..j-1 is told beside its layers and shares."""
        return {"recompute": bool(self.recompute[i, j]), "residence": PLACES[self.residence[i, j]]}

    @property
    def work_s(self) -> np.ndarray:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Stage tables of a fleet's groups, made when first asked for.

    What a step takes once where parameters or state live on the host counts by the micro-batches that
    `global_batch` is (0: one).
    """

    model: CostModel
    groups: tuple[Group, ...]
    recompute: bool = True
    global_batch: int = 0
    _tables: dict[tuple, StageTable] = field(default_factory=dict)
    _members: dict[tuple, tuple] = field(default_factory=dict)
    _sends: dict[tuple, np.ndarray] = field(default_factory=dict)
    _reduces: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict)
    _teams: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _shared: dict[Block, np.ndarray] = field(default_factory=dict)
    _least: dict[Block, np.ndarray] = field(default_factory=dict)
    _stacks: dict[tuple, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return self.model.bytes.num_layers

    def layers(self, group: Group) -> LayerCost:
        """Seconds by layer of a device, or of a team of the group's degree."""
        return self.model.layers(group.kind, group.degree)

    def devices_of(self, name: str) -> tuple[str, ...]:
        """The device called `name`, or the team it leads."""
        if not self._teams:
            for group in self.groups:
                members = group.teams or tuple((n,) for n in group.names)
                self._teams.update({team[0]: team for team in members})
        return self._teams[name]

    def seconds_a_sample(self, group: Group) -> float:
        """Seconds of one sample through all layers, in the largest measured micro-batch."""
        layers = self.layers(group)
        return float(np.sum(layers.seconds(layers.largest)) / layers.largest)

    def stage(self, block: Block, micro_batch: int, in_flight: int) -> StageTable:
        """The best split and recomputation of each run of layers with `in_flight` micro-batches held."""
        key = (block, micro_batch, in_flight)
        if key not in self._tables:
            self._tables[key] = self._made(block, micro_batch, in_flight)
        return self._tables[key]

    def _made(self, block: Block, micro_batch: int, in_flight: int) -> StageTable:
        count = self.num_layers + 1
        forward = np.full((count, count), np.inf)
        backward = np.full((count, count), np.inf)
        split = np.zeros((count, count), dtype=np.int32)
        recomputed = np.zeros((count, count), dtype=bool)
        kept = np.zeros((count, count), dtype=np.int8)
        if math.comb(micro_batch - 1, len(block) - 1) <= _ALL_SPLITS:
            splits = tuple(_splits(micro_batch, block))
        else:
            splits = tuple(self._likely_splits(micro_batch, block))
        once = np.zeros((count, count))
        for place, again in self._ways(block, splits, in_flight):
            for number, parts in enumerate(splits):
                members = [
                    self._member(g, n, in_flight, again, place) for g, n in zip(block, parts, strict=True)
                ]
                f, b, more = (np.maximum.reduce([m[k] for m in members]) for k in range(3))
                more = more * micro_batch / max(self.global_batch, micro_batch)
                better = f + b + more < forward + backward + once
                forward = np.where(better, f, forward)
                backward = np.where(better, b, backward)
                once = np.where(better, more, once)
                split[better] = number
                recomputed[better] = again
                kept[better] = PLACES.index(place)
        return StageTable(
            forward_s=forward,
            backward_s=backward + once,
            split=split,
            recompute=recomputed,
            residence=kept,
            splits=splits,
        )

    def _ways(
        self, block: Block, splits: Sequence[tuple[int, ...]], in_flight: int
    ) -> list[tuple[str | None, bool]]:
        """(residence, recompute) to choose from: the host's memory only where that of the device is short."""
        agains = (False, True) if self.recompute else (False,)
        ways: list[tuple[str | None, bool]] = [(None, again) for again in agains]
        roads = all(has_road(self.model, self.groups[g]) for g in block)
        if not (roads and self.recompute and splits):
            return ways
        runs = np.triu(np.ones((self.num_layers + 1, self.num_layers + 1), dtype=bool), 1)
        for g, n in zip(block, splits[0], strict=True):
            if not np.isfinite(self._member(g, n, in_flight, False, None)[0][runs]).all():
                return [*ways, *((place, again) for place in RESIDENCES for again in agains)]
        return ways

    def _likely_splits(self, micro_batch: int, block: Block) -> Iterator[tuple[int, ...]]:
        """Splits near the speeds of the members, each but the last moved by up to two samples."""
        speeds = [1 / self.seconds_a_sample(self.groups[g]) for g in block]
        middle = apportion(micro_batch, speeds)
        for moves in itertools.product(range(-2, 3), repeat=len(block) - 1):
            parts = [n + d for n, d in zip(middle, moves, strict=False)]
            parts.append(micro_batch - sum(parts))
            if min(parts) >= 1:
                yield tuple(parts)

    def _member(self, group: int, samples: int, in_flight: int, again: bool, place: str | None) -> tuple:
        """(forward, backward, once a step) seconds by (i, j) of one device; infinite where i ≥ j or memory is
        short.
        """
        held = self.groups[group]
        own = held.names[0] if place else ""  # the way to the host is the device's own
        key = (held.kind, held.degree, held.usable_bytes, held.banned, samples, in_flight, again, place, own)
        if key not in self._members and place:
            self._members[key] = self._resident(held, samples, in_flight, again, place)
        elif key not in self._members:
            self._members[key] = self._of_member(held, samples, in_flight, again)
        return self._members[key]

    def _resident(self, group: Group, samples: int, in_flight: int, again: bool, place: str) -> tuple:
        never = np.full((self.num_layers + 1, self.num_layers + 1), np.inf)
        if samples > self.layers(group).largest:
            return never, never, never
        f, b, once = resident_tables(self.model, group.names[0], samples, place, recompute=again)
        names = [x.name for x in self.model.profile.layers]
        held = resident_peaks(self.model.bytes, names, samples, in_flight, place, recompute=again)
        data = self.model.bytes
        home = data.parameters + data.gradients
        if host_disk(self.model.fleet, group.names[0]) is None:
            home = home + data.optimizer
        room = host_room(self.model.fleet, group.names[0])
        bad = self._is_banned(group) | (held > group.usable_bytes) | (home[None, :] - home[:, None] > room)
        step = self.model.step(group.kind)
        if step:
            f = f.copy()
            f[0] += step.input_s[min(samples, step.largest)]
        return tuple(np.where(bad, np.inf, x) for x in (f, b, once))

    def _is_banned(self, group: Group) -> np.ndarray:
        """Which runs of layers, by (i, j), are none or hold what the group may not."""
        i, j = np.arange(self.num_layers + 1)[:, None], np.arange(self.num_layers + 1)[None, :]
        bad = i >= j
        if group.banned:
            forbidden = np.zeros(self.num_layers + 1)
            forbidden[[layer + 1 for layer in group.banned]] = 1
            bad = bad | (forbidden.cumsum()[j] > forbidden.cumsum()[i])
        return bad

    def _of_member(self, group: Group, samples: int, in_flight: int, again: bool) -> tuple:
        kind, usable = group.kind, group.usable_bytes
        layers = self.layers(group)
        if samples > layers.largest:
            never = np.full((self.num_layers + 1, self.num_layers + 1), np.inf)
            return never, never, never
        sums = [np.concatenate([[0.0], x.cumsum()]) for x in layers.seconds(samples)]
        f, b = (s[None, :] - s[:, None] for s in sums)
        step = self.model.step(kind) if group.degree == 1 else None
        if step:
            f[0] += step.input_s[min(samples, step.largest)]
        i, j = np.arange(self.num_layers + 1)[:, None], np.arange(self.num_layers + 1)[None, :]
        data = self.model.bytes_at(group.degree)
        held = data.peak(i, j, samples, in_flight, recompute=again)
        if step and step.peak_bytes.any() and samples <= step.largest and not again:
            held[0, -1] = step.peak_bytes[samples]
        bad = self._is_banned(group) | (held > usable)
        return np.where(bad, np.inf, f), np.where(bad, np.inf, b + f if again else b), np.zeros_like(f)

    def ways_that_fit(
        self, block: Block, parts: tuple[int, ...], in_flight: int, i: int, j: int
    ) -> list[dict[str, Any]]:
        """All that a stage of layers i..j-1 may be told beside layers and shares, as far as it fits."""
        found = []
        for place, again in self._ways(block, [parts], in_flight):
            members = [self._member(g, n, in_flight, again, place) for g, n in zip(block, parts, strict=True)]
            if all(np.isfinite(m[0][i, j]) for m in members):
                found.append({"recompute": again, "residence": place})
        return found

    def stacked(self, block: Block, sizes: tuple[int, ...], in_flight: int) -> tuple[np.ndarray, np.ndarray]:
        """(forward, backward) seconds of `stage` for several micro-batch sizes as sizes × i × j."""
        key = (block, sizes, in_flight)
        if key not in self._stacks:
            made = [self.stage(block, b, in_flight) for b in sizes]
            self._stacks[key] = (
                np.stack([t.forward_s for t in made]),
                np.stack([t.backward_s for t in made]),
            )
        return self._stacks[key]

    def stacked_sends(self, before: Block, after: Block, sizes: tuple[int, ...]) -> np.ndarray:
        """`send_s` for several micro-batch sizes as sizes × cut."""
        key = (before, after, sizes)
        if key not in self._sends:
            self._sends[key] = np.stack([self.send_s(before, after, b) for b in sizes])
        return self._sends[key]

    def shared_reduce_s(self, block: Block) -> np.ndarray:
        """Running seconds over the layers to sum their gradients inside a shared stage."""
        if block not in self._shared:
            names = tuple(name for name, _ in self._even(block, 0, len(block)))
            self._shared[block] = _running(self._reduce_s(names))
        return self._shared[block]

    def least_reduce_s(self, block: Block) -> np.ndarray:
        """Running seconds to sum gradients with the nearest other device: the least that any sum can take."""
        if block not in self._least:
            worst = np.diff(self.shared_reduce_s(block))
            for group in set(block):
                name = self.groups[group].names[0]
                near = [g.names[-1] for g in self.groups if g.names[-1] != name]
                if near:
                    worst = np.maximum(worst, np.minimum.reduce([self._reduce_s((name, n)) for n in near]))
            self._least[block] = _running(worst)
        return self._least[block]

    def tied_reduce_s(self, before: Block, after: Block) -> np.ndarray:
        """Seconds by layer to sum gradients over the first devices of two stages."""
        return self._reduce_s((self._even(before, 0, 1)[0][0], self._even(after, len(before), 1)[0][0]))

    def _reduce_s(self, names: tuple[str, ...]) -> np.ndarray:
        if names not in self._reduces:
            sizes = self.model.bytes.summed
            seconds = [self.model.network.all_reduce_s(names, s) if s else 0.0 for s in sizes]
            self._reduces[names] = np.array(seconds)
        return self._reduces[names]

    def is_tight(self, blocks: Sequence[Block]) -> bool:
        """Whether memory could rule out a pipeline over these blocks: then short runs are worth a look."""
        data = self.model.bytes
        whole = float(data.fixed(0, self.num_layers)) + len(blocks) * float(data.saved[-1])
        return any(self.groups[g].usable_bytes < whole for block in blocks for g in block)

    def send_s(self, before: Block, after: Block, micro_batch: int) -> np.ndarray:
        """Seconds from one block to the next by the number of layers before the cut, parts taken as even."""
        key = (before, after, micro_batch)
        if key not in self._sends:
            senders, receivers = (
                self._even(before, 0, micro_batch),
                self._even(after, len(before), micro_batch),
            )
            self._sends[key] = np.array(
                [0.0]
                + [
                    shares_send_s(self.model.network, senders, receivers, size)
                    for size in self.model.bytes.output
                ]
            )
        return self._sends[key]

    def _even(self, block: Block, skip: int, micro_batch: int) -> list[tuple[str, int]]:
        named = []
        for place, group in enumerate(block):
            names = self.groups[group].names
            part = micro_batch // len(block) + (place < micro_batch % len(block))
            named.append((names[min(place + skip, len(names) - 1)], part))
        return named


def has_road(model: CostModel, group: Group) -> bool:
    """Whether parameters may live on the host: another memory, whose size and way the fleet knows."""
    name, fleet = group.names[0], model.fleet
    is_apart = group.degree == 1 and fleet.device(name).type != "cpu"
    return is_apart and fleet.host_link(name) is not None and host_room(fleet, name) > 0


def _running(values: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], values.cumsum()])


def _splits(micro_batch: int, block: Block) -> Iterator[tuple[int, ...]]:
    """All ways to share a micro-batch among the members, none empty, equal members in falling order."""
    for edges in itertools.combinations(range(1, micro_batch), len(block) - 1):
        parts = tuple(b - a for a, b in zip((0, *edges), (*edges, micro_batch), strict=True))
        equal = zip(block, block[1:], parts, parts[1:], strict=False)
        if all(g != h or n >= m for g, h, n, m in equal):
            yield parts
