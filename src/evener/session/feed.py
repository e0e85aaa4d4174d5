"""Micro-batches for one device: torch's DataLoader over exactly the samples that are its share."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from evener.core.order import GlobalBatch, epoch_order, global_batch_at


@dataclass(frozen=True, kw_only=True)
class Samples:
    """A dataset and how it is read. `drop_last` leaves out an epoch's last, smaller batch."""

    dataset: Any
    collate: Callable[[list], Any]
    workers: int = 0
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False
    worker_init_fn: Callable[[int], None] | None = None

    def epoch_size(self, global_batch: int) -> int:
        """Samples of one epoch."""
        size = len(self.dataset)
        return size - size % global_batch if self.drop_last else size


Reads = Callable[[GlobalBatch], Sequence[tuple[int, int]]]


class _Indices:
    """Dataset indices of every micro-batch that a device reads, from `samples_seen` on, without end."""

    def __init__(self, samples: Samples, global_batch: int, reads: Reads, samples_seen: int) -> None:
        self._samples, self._global_batch = samples, global_batch
        self._reads, self._seen = reads, samples_seen

    def __iter__(self) -> Iterator[list[int]]:
        samples, seen, epoch, order = self._samples, self._seen, -1, np.arange(0)
        epoch_size = samples.epoch_size(self._global_batch)
        while True:
            batch = global_batch_at(seen, epoch_size, self._global_batch)
            if batch.epoch != epoch:
                epoch = batch.epoch
                order = epoch_order(len(samples.dataset), epoch, samples.seed, shuffle=samples.shuffle)
            for start, stop in self._reads(batch):
                yield [int(i) for i in order[batch.start + start : batch.start + stop]]
            seen += batch.samples


class Feed:
    """The stream of one device's micro-batches; `next_batch` gives them in order.

    `reads(batch)` are the half-open ranges of a global batch that the device reads, in order. Made anew when
    shares change, from the same `samples_seen`: which samples belong to a global batch depends on that
    number alone.
    """

    def __init__(
        self, samples: Samples, global_batch: int, reads: Reads, *, samples_seen: int, pin: bool
    ) -> None:
        self._loader: DataLoader = DataLoader(
            samples.dataset,
            batch_sampler=_Indices(samples, global_batch, reads, samples_seen),
            collate_fn=samples.collate,
            num_workers=samples.workers,
            pin_memory=pin,
            worker_init_fn=samples.worker_init_fn,
            # A generator of its own: DataLoader would otherwise draw its base seed from the global one.
            generator=torch.Generator().manual_seed(samples.seed),
        )
        self._batches: Iterator[Any] | None = None

    def next_batch(self) -> Any:
        """The next micro-batch, on the host."""
        if self._batches is None:
            self._batches = iter(self._loader)
        return next(self._batches)

    def close(self) -> None:
        """Stop the loader's worker processes."""
        self._batches = None
