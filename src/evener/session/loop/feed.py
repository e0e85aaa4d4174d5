"""Micro-batches for one device: torch's DataLoader over exactly the samples that are its share."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

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

    def indices(self, batch: GlobalBatch, part: tuple[int, int]) -> list[int]:
        """Indices in the dataset of the half-open range `part` of a global batch."""
        order = _order(len(self.dataset), batch.epoch, self.seed, shuffle=self.shuffle)
        return [int(i) for i in order[batch.start + part[0] : batch.start + part[1]]]

    def load(self, batch: GlobalBatch, part: tuple[int, int]) -> Any:
        """Those samples as one batch, read in this process."""
        return self.collate([self.dataset[i] for i in self.indices(batch, part)])


_order = lru_cache(maxsize=2)(epoch_order)
Reads = Callable[[GlobalBatch], Sequence[tuple[int, int]]]


def first_unreadable(dataset: Any, indices: Sequence[int], budget_s: float = 3.0) -> int | None:
    """The first of `indices` at which reading raises, tried one by one for so long; None where none does."""
    end = time.monotonic() + budget_s
    for index in indices:
        if time.monotonic() > end:
            return None
        try:
            dataset[index]
        except Exception:  # the user's own: the caller has its words
            return index
    return None


class _Indices:
    """Dataset indices of every micro-batch that a device reads, from `samples_seen` on, without end."""

    def __init__(self, samples: Samples, global_batch: int, reads: Reads, samples_seen: int) -> None:
        self._samples, self._global_batch = samples, global_batch
        self._reads, self._seen = reads, samples_seen
        self.to_skip = 0

    def __iter__(self) -> Iterator[list[int]]:
        samples, seen = self._samples, self._seen
        epoch_size = samples.epoch_size(self._global_batch)
        while True:
            batch = global_batch_at(seen, epoch_size, self._global_batch)
            for part in self._reads(batch):
                if self.to_skip:
                    self.to_skip -= 1
                else:
                    yield samples.indices(batch, part)
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
        self._indices = _Indices(samples, global_batch, reads, samples_seen)
        self._loader: DataLoader = DataLoader(
            samples.dataset,
            batch_sampler=self._indices,
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

    def skip(self, count: int) -> None:
        """Leave out the next `count` micro-batches; workers may have read them already."""
        if self._loader.num_workers == 0:
            self._indices.to_skip += count  # asked for one by one, so they are never read
        else:
            for _ in range(count):
                self.next_batch()

    def close(self) -> None:
        """Stop the loader's worker processes."""
        self._batches = None
