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


class _Asked:
    """Stands for `optimizer._step_supports_amp_scaling`, which a scaler's step() reads before anything else.

    A `torch.amp.GradScaler` that `prepare` was not given would end a turn without gradients in an assertion.
    """

    def __init__(self, own: bool, steps: LoopSteps) -> None:
        self._own, self._steps = own, steps

    def __bool__(self) -> bool:
        if not (self._steps.accepts or self._steps.moved):
            raise UsageError(
                f"a GradScaler that ev.prepare was not given looks for gradients on {self._steps.here} in a "
                "turn that leaves none",
                numbers=self._steps.turn,
                remedy="ev.prepare(…, scaler=scaler): it then acts once a global batch",
            )
        return self._own


def watch_for_scalers(optimizer: torch.optim.Optimizer, steps: LoopSteps) -> None:
    """A scaler that `prepare` was not given is refused in a turn without gradients, with what would work."""
    own = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    optimizer._step_supports_amp_scaling = _Asked(own, steps)  # type: ignore[attr-defined]


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
