"""Registers the device type with torch: once in a process, for one device, until the process ends."""

import ctypes
import gc
from typing import Any

import torch
from torch.optim.optimizer import _foreach_supported_types as optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as tensor_types
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from evener.core.figures import Curve
from evener.core.fleet import Device
from evener.errors import UsageError
from evener.rehearsal.device import autocasting, copies, substitutes
from evener.rehearsal.device.card import Card
from evener.rehearsal.device.clock import Clock
from evener.rehearsal.device.dispatch import Dispatcher
from evener.rehearsal.device.module import DeviceModule, answer_for_accelerator
from evener.rehearsal.device.tensor import NAME, RehearsalTensor

_LIBRARIES: list[torch.library.Library] = []  # a library that is collected takes its registrations with it
_KEPT: list[BaseException] = []  # errors of a backward pass, until it has ended
_opened: "_Opened | None" = None


class _Opened:
    """What is registered, and can be pointed at another card."""

    def __init__(self, card: Card) -> None:
        self.dispatcher, self.module = Dispatcher(card), DeviceModule(card)

    @property
    def card(self) -> Card:
        return self.dispatcher.card

    def change(self, card: Card) -> None:
        self.dispatcher.card = self.module.card = card


def open_card(
    device: Device,
    host_link: Curve | None = None,
    *,
    clock: Clock | None = None,
    expandable: bool = False,
    timed: bool = True,
) -> Card:
    """Make `device` the accelerator of this process, `rehearsal:0`; see `Card`. Untimed, nothing takes time.

    Where one was open before, it takes its place; UsageError while tensors lie on that one.
    """
    global _opened
    if _opened is None:
        torch.utils.rename_privateuse1_backend(NAME)
    else:
        _check_empty(_opened.card)
    card = Card(device, host_link, clock=clock, expandable=expandable)
    card.timed = timed
    if _opened is None:
        _opened = _Opened(card)
        _register(_opened)
    else:
        _opened.change(card)
    return card


def _check_empty(card: Card) -> None:
    gc.collect()
    held = card.memory.used.current
    if held:
        raise UsageError(
            f"this process rehearses {card.device.name}, and tensors lie on it",
            numbers=f"{held} bytes",
            remedy="a process for each device, as `evener train --rehearse` starts them",
        )


def _register(opened: _Opened) -> None:
    dispatcher, module = opened.dispatcher, opened.module
    RehearsalTensor.dispatch = dispatcher.run
    _setup_privateuseone_for_python_backend(NAME, backend_module=module, device_guard=_Guard())
    _library("_", "PrivateUse1").fallback(lambda func, *args, **kwargs: dispatcher.run(func, args, kwargs))
    aten = _library("aten", "PrivateUse1")
    for name in ("_copy_from", "_copy_from_and_resize"):
        func = getattr(torch.ops.aten, name).default
        aten.impl(name, lambda *args, _func=func, **kwargs: dispatcher.run(_func, args, kwargs))
    host = _library("aten", "CPU")
    host.impl("_pin_memory", lambda tensor, device=None: copies.pin(tensor))
    host.impl("is_pinned", lambda tensor, device=None: copies.is_pinned(tensor))
    torch.empty = copies.pinning(torch.empty)
    autocasting.register(_library)
    substitutes.register(_library)
    # A device in Python has no storages: they load on the host, and tensors saved from it move there.
    torch.serialization.register_package(5, lambda storage: None, _stay_on_host)
    _raise_after_backward()
    answer_for_accelerator(module)
    # Moving a module swaps what its parameters hold: tied ones, and those of an optimiser, stay the same.
    torch.__future__.set_swap_module_params_on_conversion(True)
    # Optimisers work on all parameters at once by default, as they do on other accelerators.
    for known in (optimizer_types, tensor_types):
        known.append(RehearsalTensor)  # type: ignore[arg-type]
    # The fused layer of nn.TransformerEncoder hides its products from the roofline.
    torch.backends.mha.set_fastpath_enabled(False)


def _library(namespace: str, key: str) -> torch.library.Library:
    library = torch.library.Library(namespace, "IMPL", key)
    _LIBRARIES.append(library)
    return library


def _stay_on_host(storage: Any, location: str) -> Any:
    return storage if location.startswith(NAME) else None


class _Guard(torch._C._acc.DeviceGuard):
    """Asked for the device's type at both ends of each backward node.

    An error on its way out of a node is pending then, and calling Python with one pending ends the process.
    So it is taken off here, which any call of Python's own interface does, and raised again by
    `_raise_after_backward` when torch has unwound the rest.
    """

    def type_(self) -> Any:
        try:
            _pending()
        except BaseException as e:
            _KEPT.append(e)
        return torch._C._autograd.DeviceType.PrivateUse1


_pending = ctypes.pythonapi.PyErr_Occurred


def _raise_after_backward() -> None:
    run = torch.autograd.graph._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        _KEPT.clear()
        try:
            with torch.autograd.set_multithreading_enabled(False):  # a thread of its own costs 200 µs
                return run(*args, **kwargs)
        except SystemError:
            if not _KEPT:
                raise
            kept = _KEPT.pop(0)
        finally:
            _KEPT.clear()
        raise kept

    torch.autograd.graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward
