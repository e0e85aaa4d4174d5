"""What is right: a plain PyTorch loop over whole global batches on one device. Imports nothing of evener."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Gradients = list[torch.Tensor | None]


@dataclass
class PlainRun:
    """By step: gradients as the optimiser got them, mean loss, norm before clipping; parameters after all."""

    gradients: list[Gradients] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)


def plain_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Any],
    mean_loss: Callable[[nn.Module, Any], torch.Tensor],
    max_norm: float | None = None,
) -> PlainRun:
    """Train `model` on one whole global batch after another; `mean_loss(model, batch)` is minimised."""
    run = PlainRun()
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = mean_loss(model, batch)
        loss.backward()
        run.losses.append(float(loss.detach()))
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
        run.norms.append(float(norm))
        run.gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
    run.parameters = [p.detach().clone() for p in model.parameters()]
    return run


def relative_error(got: Sequence[torch.Tensor | None], want: Sequence[torch.Tensor | None]) -> float:
    """‖got − want‖ / ‖want‖ over all tensors together; infinite where only one of two is absent."""
    error = norm = 0.0
    for a, b in zip(got, want, strict=True):
        if (a is None) != (b is None):
            return float("inf")
        if a is not None and b is not None:
            error += float((a.double() - b.double()).square().sum())
            norm += float(b.double().square().sum())
    return (error / norm) ** 0.5 if norm else error**0.5
