"""Copies between host and device: they take the link's time, and the host waits unless it may not.

x.to("rehearsal")                          the host waits for the copy
pinned.to("rehearsal", non_blocking=True)  queued; the buffer must not be written before it ended
y.to("cpu", non_blocking=True)             queued; the values are there once the host has waited
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from evener.rehearsal.device.tensor import NAME, RehearsalTensor

aten = torch.ops.aten
_PINNED = "pinned_for_rehearsal"


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` in host memory that copies to the device need not stage."""
    pinned = torch.empty_like(tensor, device="cpu")
    pinned.copy_(tensor)
    return mark_pinned(pinned)


def mark_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, whose storage counts as pinned from now on."""
    setattr(tensor.untyped_storage(), _PINNED, True)
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether `tensor` lies in pinned host memory."""
    return getattr(tensor.untyped_storage(), _PINNED, False)


def pinning(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.empty with `pin_memory`, which a backend in Python has no allocator for."""

    @functools.wraps(empty)
    def make(*size: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = empty(*size, **kwargs)
        return mark_pinned(made) if pin_memory and made.device.type == "cpu" else made

    return make


def _to_copy(dispatcher: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    source = args[0]
    rest = dict(kwargs)
    target, non_blocking = rest.pop("device", None), rest.pop("non_blocking", False)
    rest.pop("pin_memory", None)
    if not isinstance(source, RehearsalTensor):  # a host tensor that goes to the device
        moved = dispatcher.shell(func(source, **rest, device="cpu"))
        _charge_in(dispatcher, source, non_blocking)
        return moved
    if target is None or torch.device(target).type == NAME:
        return _on_device(dispatcher, aten._to_copy.default, (source,), rest)
    values = func(source.content, **rest, device=target)
    if torch.device(target).type != "cpu":
        return values
    if non_blocking:
        mark_pinned(values)
    _charge_out(dispatcher, values, values.clone() if non_blocking else None)
    return values


def _copy_(dispatcher: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    target, source, *more = args
    non_blocking = more[0] if more else kwargs.get("non_blocking", False)
    here = isinstance(target, RehearsalTensor), isinstance(source, RehearsalTensor)
    if here == (True, True):
        return _on_device(dispatcher, aten.copy_.default, (target, source), {})
    if here == (True, False):
        target.content.copy_(source)
        _charge_in(dispatcher, source, non_blocking)
        return target
    target.copy_(source.content)
    asynchronous = non_blocking and is_pinned(target)
    _charge_out(dispatcher, target, target.clone() if asynchronous else None)
    return target


def _copy_from(dispatcher: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    source, target, *more = args
    non_blocking = more[0] if more else kwargs.get("non_blocking", False)
    return _copy_(dispatcher, aten.copy_.default, (target, source, non_blocking), {})


def _on_device(dispatcher: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    return dispatcher.compute(func, dispatcher.op(func), args, kwargs)


def _charge_in(dispatcher: Any, source: torch.Tensor, non_blocking: bool) -> None:
    card = dispatcher.card
    end_s = card.copied(source.nbytes, inwards=True)
    if card.muted:
        return
    if non_blocking and is_pinned(source):
        card.flights.inwards(source, end_s)
    else:
        card.clock.wait(end_s)


def _charge_out(dispatcher: Any, host: torch.Tensor, values: torch.Tensor | None) -> None:
    card = dispatcher.card
    end_s = card.copied(host.nbytes, inwards=False)
    if card.muted:
        return
    if values is not None:
        card.flights.outwards(host, values, end_s)
    else:
        card.clock.wait(end_s)


COPIES = {
    "_to_copy": _to_copy,
    "copy_": _copy_,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from,
}
"""The operations that move tensors, by name."""
