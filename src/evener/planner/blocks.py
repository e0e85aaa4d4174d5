"""Who can run one stage, and how long every run of layers takes them: tables for the search."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from evener.core.split import apportion
from evener.cost.communication import shares_send_s
from evener.cost.evaluate import CostModel
from evener.cost.layers import LayerCost
from evener.planner.groups import Group

_ALL_SPLITS = 40
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
    splits: tuple[tuple[int, ...], ...]

    @property
    def work_s(self) -> np.ndarray:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Stage tables of a fleet's groups, made when first asked for."""

    model: CostModel
    groups: tuple[Group, ...]
    recompute: bool = True
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
        if math.comb(micro_batch - 1, len(block) - 1) <= _ALL_SPLITS:
            splits = tuple(_splits(micro_batch, block))
        else:
            splits = tuple(self._likely_splits(micro_batch, block))
        for again in (False, True) if self.recompute else (False,):
            for number, parts in enumerate(splits):
                members = [self._member(g, n, in_flight, again) for g, n in zip(block, parts, strict=True)]
                f = np.maximum.reduce([m[0] for m in members])
                b = np.maximum.reduce([m[1] for m in members])
                better = f + b < forward + backward
                forward = np.where(better, f, forward)
                backward = np.where(better, b, backward)
                split[better] = number
                recomputed[better] = again
        return StageTable(
            forward_s=forward, backward_s=backward, split=split, recompute=recomputed, splits=splits
        )

    def _likely_splits(self, micro_batch: int, block: Block) -> Iterator[tuple[int, ...]]:
        """Splits near the speeds of the members, each but the last moved by up to two samples."""
        speeds = [1 / self.seconds_a_sample(self.groups[g]) for g in block]
        middle = apportion(micro_batch, speeds)
        for moves in itertools.product(range(-2, 3), repeat=len(block) - 1):
            parts = [n + d for n, d in zip(middle, moves, strict=False)]
            parts.append(micro_batch - sum(parts))
            if min(parts) >= 1:
                yield tuple(parts)

    def _member(self, group: int, samples: int, in_flight: int, again: bool) -> tuple[np.ndarray, np.ndarray]:
        """(forward, backward) seconds by (i, j) of one device; infinite where i ≥ j or memory is short."""
        held = self.groups[group]
        key = (held.kind, held.degree, held.usable_bytes, held.banned, samples, in_flight, again)
        if key not in self._members:
            self._members[key] = self._of_member(held, samples, in_flight, again)
        return self._members[key]

    def _of_member(self, group: Group, samples: int, in_flight: int, again: bool) -> tuple:
        kind, usable = group.kind, group.usable_bytes
        layers = self.layers(group)
        if samples > layers.largest:
            never = np.full((self.num_layers + 1, self.num_layers + 1), np.inf)
            return never, never
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
        bad = (i >= j) | (held > usable)
        if group.banned:
            forbidden = np.zeros(self.num_layers + 1)
            forbidden[[layer + 1 for layer in group.banned]] = 1
            bad |= forbidden.cumsum()[j] > forbidden.cumsum()[i]
        return np.where(bad, np.inf, f), np.where(bad, np.inf, b + f if again else b)

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

    def _reduce_s(self, names: tuple[str, ...]) -> np.ndarray:
        if names not in self._reduces:
            sizes = np.diff(self.model.bytes.gradients)
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


def _running(values: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], values.cumsum()])


def _splits(micro_batch: int, block: Block) -> Iterator[tuple[int, ...]]:
    """All ways to share a micro-batch among the members, none empty, equal members in falling order."""
    for edges in itertools.combinations(range(1, micro_batch), len(block) - 1):
        parts = tuple(b - a for a, b in zip((0, *edges), (*edges, micro_batch), strict=True))
        equal = zip(block, block[1:], parts, parts[1:], strict=False)
        if all(g != h or n >= m for g, h, n, m in equal):
            yield parts


def counts_of(blocks: Sequence[Block], num_groups: int) -> tuple[int, ...]:
    """Devices of each group that a sequence of blocks takes."""
    flat = [g for block in blocks for g in block]
    return tuple(flat.count(g) for g in range(num_groups))
