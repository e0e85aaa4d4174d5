"""Bytes: what does not fit, and how much a step holds at its peak."""

import gc
from collections.abc import Iterable

import torch

from evener.core.figures import Figure

_FULL = ("can't allocate memory", "not enough memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that a device's memory is full; the CPU's allocator only raises RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _FULL)


def give_back(device: torch.device) -> None:
    """Free what a failed attempt has left, so that the next one starts from the same memory."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimiser's state, as it is after a step."""
    values = (v for state in optimizer.state.values() for v in state.values())
    return sum(v.nbytes for v in values if isinstance(v, torch.Tensor))


def start_peak(device: torch.device) -> None:
    """Forget the peak so far."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def peak_since(device: torch.device, parts: Iterable[float]) -> Figure:
    """The most bytes held since `start_peak`: measured on an accelerator, else the sum of `parts`."""
    if device.type != "cpu":
        measured = torch.accelerator.max_memory_allocated(device)
        if measured:
            return Figure(value=measured, source="measured")
    return Figure(value=max(1.0, sum(parts)), source="fitted", note="sum of what the step holds")
