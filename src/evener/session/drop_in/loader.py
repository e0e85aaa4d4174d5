"""What a loop of one's own iterates over: this device's micro-batches, one a turn; its place in the data."""

from collections.abc import Iterator
from typing import Any

import torch

from evener.core.order import global_batch_at
from evener.core.plan import Plan
from evener.errors import UsageError
from evener.runtime.checkpoints.manifest import Position
from evener.runtime.problem import to_device
from evener.runtime.ranks import Ranks
from evener.session.drop_in.steps import LoopSteps
from evener.session.loop.feed import Feed, Samples
from evener.session.loop.playbook import Playbook
from evener.session.meeting import Meeting


class ShareLoader:
    """Iterates over one epoch of this device's micro-batches; counts samples seen over all epochs.

    `batch_size`, `dataset` and `drop_last` are those of the DataLoader it was made from.
    """

    def __init__(
        self,
        samples: Samples,
        plan: Plan,
        steps: LoopSteps,
        device: torch.device,
        meeting: Meeting,
        ranks: Ranks,
    ) -> None:
        self.plan, self.samples_seen, self.steps_taken = plan, 0, 0
        self.device, self.meeting, self.ranks = device, meeting, ranks
        self._samples, self._steps = samples, steps
        self.batch_size, self.dataset, self.drop_last = plan.global_batch, samples.dataset, samples.drop_last
        self._in_hand = 0  # samples of the global batch that the loop is at
        self._playbook = Playbook(plan, steps.here)

    def __len__(self) -> int:
        """Micro-batches of this device in an epoch."""
        return sum(len(sizes) for _, sizes in self._epoch(0))

    def __iter__(self) -> Iterator[Any]:
        pin = self.device.type != "cpu"
        feed = Feed(
            self._samples,
            self.plan.global_batch,
            self._playbook.reads,
            samples_seen=self.samples_seen,
            pin=pin,
        )
        for total, sizes in self._epoch(self.samples_seen):
            self._in_hand = total
            try:
                for number, size in enumerate(sizes):
                    batch = feed.next_batch() if size else self._samples.collate([self._samples.dataset[0]])
                    self._steps.begin(batch, size, total, last=number >= len(sizes) - 1)
                    yield to_device(batch, self.device)
            except GeneratorExit:  # the loop was left by a break
                self._count(total if self._steps.leave() else 0)
                raise
            self._steps.settle()
            self._count(total)
        feed.close()
        self._steps.end_epoch()

    @property
    def position(self) -> Position:
        """Where in its data the loop is; UsageError between a global batch's first turn and its step."""
        if self._in_hand and not self._steps.is_done:
            raise UsageError(
                f"the loop on {self.ranks.here} is in the middle of a global batch",
                remedy="save after the optimizer.step() that moves: loader.at_boundary is then true",
            )
        return Position(
            step=self.steps_taken + bool(self._in_hand),
            samples_seen=self.samples_seen + self._in_hand,
            seed=self._samples.seed,
            global_batch=self.plan.global_batch,
            dataset_size=len(self._samples.dataset),
            shuffle=self._samples.shuffle,
        )

    @property
    def at_boundary(self) -> bool:
        """Whether the global batch at hand has been taken in full: the time to save or to evaluate."""
        return not self._in_hand or self._steps.is_done

    def go_on_from(self, position: Position) -> None:
        """The next loop begins where `position` is."""
        self.samples_seen, self.steps_taken = position.samples_seen, position.step

    def _count(self, samples: int) -> None:
        self.samples_seen += samples
        self.steps_taken += bool(samples)
        self._in_hand = 0

    def _epoch(self, seen: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(samples of the global batch, sizes of this device's micro-batches) up to the epoch's end."""
        size = self._samples.epoch_size(self.plan.global_batch)
        epoch = seen // size
        while seen // size == epoch:
            batch = global_batch_at(seen, size, self.plan.global_batch)
            # A device without samples in a small last batch has one turn with a stand-in that does not count.
            yield batch.samples, tuple(b - a for a, b in self._playbook.reads(batch)) or (0,)
            seen += batch.samples
