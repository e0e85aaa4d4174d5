"""The same steps in a plain PyTorch loop on one device: what every plan is held against.

Imports nothing of the runtime. The order of samples is a pure function that both sides share.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from evener.core.order import epoch_order, global_batch_at


class PlainLoop:
    """One device, one batch, one optimiser: `run` takes the steps and keeps the first gradient.

    `sizes_of(samples)` gives the micro-batches the batch is run in: the whole batch at once, or the
    plan's own micro-batches where BatchNorm makes a micro-batch's statistics part of the result.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_and_weight: Callable, max_norm: Any
    ) -> None:
        self.model, self.optimizer, self.max_norm = model, optimizer, max_norm
        self._loss_and_weight = loss_and_weight
        self.first_gradient: dict[str, torch.Tensor] = {}

    def run(
        self,
        batch_at: Callable[[list[int]], Any],
        dataset_size: int,
        global_batch: int,
        steps: int,
        *,
        seed: int,
        shuffle: bool,
        sizes_of: Callable[[int], tuple[int, ...]],
        rate_at: Callable[[int], float] | None,
    ) -> None:
        """Take `steps` optimiser steps from the first sample on."""
        base = [group["lr"] for group in self.optimizer.param_groups]
        seen = 0
        for step in range(steps):
            batch = global_batch_at(seen, dataset_size, global_batch)
            order = epoch_order(dataset_size, batch.epoch, seed, shuffle=shuffle)[batch.start : batch.stop]
            for group, rate in zip(self.optimizer.param_groups, base, strict=True):
                group["lr"] = rate * (rate_at(seen) if rate_at else 1.0)
            self._step(batch_at, [int(i) for i in order], sizes_of(batch.samples), first=step == 0)
            seen += batch.samples

    def _step(self, batch_at: Callable, indices: list[int], sizes: tuple[int, ...], *, first: bool) -> None:
        self.optimizer.zero_grad()
        total_weight, at = 0.0, 0
        for size in sizes:
            loss_sum, weight = self._loss_and_weight(batch_at(indices[at : at + size]), size)
            at += size
            if weight:
                loss_sum.backward()
                total_weight += weight
        grads = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        for grad in grads.values():
            grad.div_(total_weight)
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        if first:
            self.first_gradient = {n: g.detach().cpu().clone() for n, g in grads.items()}
        self.optimizer.step()
