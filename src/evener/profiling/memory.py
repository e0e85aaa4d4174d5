"""Bytes: what does not fit, and how much a step holds at its peak."""

import gc
from collections.abc import Iterable, Mapping

import torch

from evener.core.figures import Figure


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


def room_on(device: torch.device) -> float | None:
    """Bytes that tensors may take on `device` in all; None where nobody counts them."""
    if device.type == "cpu":
        return None
    free, _ = torch.accelerator.get_memory_info(device)
    return free + torch.accelerator.memory_reserved(device)


def between(peaks: Mapping[int, float], refused: int, room_bytes: float | None) -> list[int]:
    """Sizes to try between the largest that fits and `refused`, the most promising first.

    By the line through the two largest peaks, which are `peaks` by size; then 3 and 6 % less. Example: 10
    bytes at 4 samples and 18 at 8 are 2 a sample: of 29 bytes 13 samples would take 28.
    """
    if room_bytes is None or len(peaks) < 2:
        return []
    few, many = sorted(peaks)[-2:]
    slope = (peaks[many] - peaks[few]) / (many - few)
    if slope <= 0:
        return []
    best = min(refused - 1, many + int((room_bytes - peaks[many]) / slope))
    return [n for n in dict.fromkeys(int(best * part) for part in (1.0, 0.97, 0.94)) if n > many]
