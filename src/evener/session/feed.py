"""Micro-batches for one device: torch's DataLoader over exactly the samples that are its share."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from evener.core.order import epoch_order, global_batch_at, micro_batches_of
from evener.core.plan import Plan
from evener.session.recipe import Recipe


class _ShareIndices:
    """Dataset indices of one pipeline's micro-batches, from `samples_seen` on, without end."""

    def __init__(self, recipe: Recipe, plan: Plan, pipeline: int, samples_seen: int, seed: int) -> None:
        self._recipe, self._plan, self._pipeline = recipe, plan, pipeline
        self._seen, self._seed = samples_seen, seed

    def __iter__(self) -> Iterator[list[int]]:
        size, seen, epoch = len(self._recipe.dataset), self._seen, -1
        order = np.arange(0)
        while True:
            batch = global_batch_at(seen, size, self._plan.global_batch)
            if batch.epoch != epoch:
                epoch = batch.epoch
                order = epoch_order(size, epoch, self._seed, shuffle=self._recipe.shuffle)
            for start, stop in micro_batches_of(self._plan, self._pipeline, batch):
                yield [int(i) for i in order[start:stop]]
            seen += batch.samples


class Feed:
    """The stream of one device's micro-batches; `next_batch` gives them in order.

    Made anew when shares change, from the same `samples_seen`: which samples belong to a global batch
    depends on that number alone.
    """

    def __init__(
        self, recipe: Recipe, plan: Plan, pipeline: int, *, samples_seen: int, seed: int, pin: bool
    ) -> None:
        # A generator of its own: DataLoader would otherwise draw its base seed from the global one.
        self._loader: DataLoader = DataLoader(
            recipe.dataset,
            batch_sampler=_ShareIndices(recipe, plan, pipeline, samples_seen, seed),
            collate_fn=recipe.collate_fn,
            num_workers=recipe.workers,
            pin_memory=pin,
            generator=torch.Generator().manual_seed(seed),
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
