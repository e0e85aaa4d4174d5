"""What `prepare` was given: of the right types, and belonging together."""

from numbers import Integral
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from evener.errors import UsageError
from evener.session.drop_in.loader import ShareLoader

_ORDER = "model, optimizer, loader = ev.prepare(model, optimizer, loader)"


def check_asked(
    model: Any,
    optimizer: Any,
    loader: Any,
    micro_batch: Any = None,
    batch_per_device: Any = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
) -> None:
    """UsageError for an argument of another type, an empty dataset, or an optimiser of another model."""
    if isinstance(loader, ShareLoader):
        raise UsageError(
            "this loader was prepared already", remedy="prepare once, and loop as often as you like"
        )
    for what, value, kind in (
        ("model", model, nn.Module),
        ("optimizer", optimizer, torch.optim.Optimizer),
        ("loader", loader, DataLoader),
    ):
        if not isinstance(value, kind):
            raise UsageError(
                f"prepare's {what} is a {type(value).__name__}, not a torch {kind.__name__}", remedy=_ORDER
            )
    for what, value, calls in (
        ("scheduler", scheduler, ("step",)),
        ("scaler", scaler, ("unscale_", "step", "update")),
    ):
        lacking = [name for name in calls if not callable(getattr(value, name, None))]
        if value is not None and lacking:
            raise UsageError(
                f"prepare's {what} is a {type(value).__name__}, which has no {lacking[0]}()",
                remedy="one of torch.optim.lr_scheduler" if what == "scheduler" else "a torch.amp.GradScaler",
            )
    own = {id(p) for p in model.parameters()}
    moved = [p for group in optimizer.param_groups for p in group["params"]]
    strange = sum(id(p) not in own for p in moved)
    if strange:
        raise UsageError(
            "the optimizer moves parameters that are not the model's, whose gradients nobody would sum",
            numbers=f"{strange} of {len(moved)} tensors",
            remedy="an optimizer made from this model's parameters; make a loss with parameters a part of it",
        )
    if micro_batch is not None:
        _whole("micro_batch", micro_batch, 1)
    if isinstance(batch_per_device, dict | list | tuple):
        for n in batch_per_device.values() if isinstance(batch_per_device, dict) else batch_per_device:
            _whole("batch_per_device", n, 0)
    elif batch_per_device is not None:
        raise UsageError(
            f"batch_per_device is a {type(batch_per_device).__name__}: {batch_per_device!r:.60}",
            remedy="[40, 24], samples in the order of processes, or {'host/gpu0': 40, …}",
        )


def _whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise UsageError(
            f"{name} of {value!r:.60} is no number of samples", remedy=f"whole numbers from {least} on"
        )
