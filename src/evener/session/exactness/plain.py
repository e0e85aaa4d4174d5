"""The same steps in a plain PyTorch loop on one device: what every plan is held against.

Imports nothing of the runtime. The order of samples is a pure function that both sides share.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from evener.core.order import epoch_order, global_batch_at


class PlainLoop:
    """One device, one batch, one optimiser: `run` takes the steps and keeps the first gradient.

    `parts_of(samples)` gives the positions in the batch that are run at once: the whole batch, or the
    plan's own micro-batches or waves where BatchNorm makes their statistics part of the result.
    `around(step, positions)` is entered around forward and again around backward: keys of masks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_and_weight: Callable,
        max_norm: Any,
        around: Callable[[int, Sequence[int]], AbstractContextManager] | None = None,
    ) -> None:
        self.model, self.optimizer, self.max_norm = model, optimizer, max_norm
        self._around = around or (lambda step, positions: nullcontext())
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
        parts_of: Callable[[int], Sequence[Sequence[int]]],
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
            self._step(step, batch_at, [int(i) for i in order], parts_of(batch.samples))
            seen += batch.samples

    def _step(
        self, number: int, batch_at: Callable, indices: list[int], parts: Sequence[Sequence[int]]
    ) -> None:
        self.optimizer.zero_grad()
        total_weight = 0.0
        for positions in parts:
            around = self._around(number, positions)
            with around:
                loss_sum, weight = self._loss_and_weight(
                    batch_at([indices[i] for i in positions]), len(positions)
                )
            if weight:
                with around:
                    loss_sum.backward()
                total_weight += weight
        grads = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        for grad in grads.values():
            grad.div_(total_weight)
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        if number == 0:
            self.first_gradient = {n: g.detach().cpu().clone() for n, g in grads.items()}
        self.optimizer.step()
