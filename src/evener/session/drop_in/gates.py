"""What a loop calls every turn, made to act once a global batch: optimiser, scheduler, scaler."""

import functools
from typing import Any

import torch

from evener.errors import UsageError
from evener.session.drop_in.steps import LoopSteps


def gate_optimizer(optimizer: torch.optim.Optimizer, steps: LoopSteps) -> None:
    """`optimizer.step()` moves after the sum over all devices, and does nothing in other turns."""
    move = optimizer.step

    @functools.wraps(move)  # with its attributes: LR schedulers look for a mark of theirs
    def step(closure: Any = None) -> Any:
        if closure is not None:
            raise UsageError(
                "an optimiser with a closure runs the model by itself and cannot be shared out",
                remedy="an optimiser whose step() takes no closure",
            )
        return move() if steps.may_move() else None

    optimizer.step = step  # type: ignore[method-assign]


def gate_scheduler(scheduler: Any, steps: LoopSteps) -> None:
    """`scheduler.step()` moves where the optimiser has moved since: once a global batch, or once an epoch."""
    move, seen = scheduler.step, steps.num_moves

    def step(*args: Any, **kwargs: Any) -> None:
        nonlocal seen
        if steps.num_moves > seen:  # called every turn or once an epoch: either way only after a move
            seen = steps.num_moves
            move(*args, **kwargs)

    scheduler.step = step


def gate_scaler(scaler: Any, steps: LoopSteps) -> None:
    """A `torch.amp.GradScaler` looks at gradients where there are some: after the sum over all devices.

    All devices have the same sum, so all find an overflow alike, and all keep the same scale.
    """
    unscale, move, update = scaler.unscale_, scaler.step, scaler.update
    has_looked = False

    def unscale_(optimizer: torch.optim.Optimizer) -> None:
        if steps.accepts:
            unscale(optimizer)

    def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        nonlocal has_looked
        if not steps.accepts:
            return None
        has_looked = True
        result = move(optimizer, *args, **kwargs)
        steps.passed_by()  # nothing has moved where the scaler found an overflow
        return result

    def update_(new_scale: Any = None) -> None:
        nonlocal has_looked
        if has_looked:
            has_looked = False
            update(new_scale)

    scaler.unscale_, scaler.step, scaler.update = unscale_, step, update_
