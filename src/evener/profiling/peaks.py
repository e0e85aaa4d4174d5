"""How far memory rises while each layer runs, on devices that count it: what a cut of the model will need.

memory ▲            ╭╮  loss                     before     parameters, gradients, optimiser state
       │       ╭╮╭──╯╰╮                          steps      what each layer saves for its backward
       │    ╭╮╭╯╰╯    ╰╮╭╮                       peaks      work: what comes and goes while a layer runs
       │ ╭──╯╰╯        ╰╯╰─╮
       └─layer 0 … L-1──L-1 … 0──► time
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from evener.profiling.anatomy import OUTSIDE
from evener.profiling.chain import Piece
from evener.profiling.steps import Subject


def counts_memory(device: torch.device) -> bool:
    """Whether torch can say how much memory of `device` is in use."""
    return device.type != "cpu" and torch.accelerator.max_memory_allocated(device) > 0


def layer_peaks(
    subject: Subject, pieces: Sequence[Piece], size: int
) -> tuple[dict[str, tuple[int, int]], int]:
    """Bytes at the peak of each layer's forward and backward, at `size` samples, beyond what was held before.

    By layer name, as (forward, backward); `OUTSIDE` has what comes before, between and after: the batch
    and the loss. Beside them the bytes of the batch. Gradients must be there already. Out of memory is
    passed on as it is.
    """
    watch = _Watch(subject.device)
    batch = subject.batch(size)

    def leave(name: str) -> Callable:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            watch.passed(name, 0)
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: watch.enter(name))

        return hook

    with ExitStack() as stack:
        for piece in pieces:
            if piece.module is not None:
                enter = piece.module.register_forward_pre_hook(lambda *_: watch.passed(OUTSIDE, 0))
                stack.callback(enter.remove)
                stack.callback(piece.module.register_forward_hook(leave(piece.name)).remove)
        loss = subject.step_loss(subject.model, batch)
        watch.passed(OUTSIDE, 0)
        loss.backward()
        watch.passed(watch.inside, 1)
    return {name: (peaks[0], peaks[1]) for name, peaks in watch.peaks.items()}, watch.first or 0


class _Watch:
    """Reads the device's peak again and again, each time as of the last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = torch.accelerator.memory_allocated(device)
        self.inside = OUTSIDE
        self.first: int | None = None
        self.peaks: dict[str, list[int]] = {}
        torch.accelerator.reset_peak_memory_stats(device)

    def passed(self, name: str, which: int) -> None:
        """What happened since the last call was `name`'s forward (0) or backward (1)."""
        peak = torch.accelerator.max_memory_allocated(self._device) - self._before
        if self.first is None:
            self.first = torch.accelerator.memory_allocated(self._device) - self._before
        both = self.peaks.setdefault(name, [0, 0])
        both[which] = max(both[which], peak)
        torch.accelerator.reset_peak_memory_stats(self._device)

    def enter(self, name: str) -> None:
        """The backward of `name` begins, and ends that of the layer before."""
        self.passed(self.inside, 1)
        self.inside = name


def work_bytes(
    order: Sequence[str], peaks: dict[str, tuple[int, int]], saved: Callable[[str], float]
) -> dict[str, float]:
    """What each layer of the chain `order` needs at its peak beyond what is saved up to and with it.

        work = max(peak of its forward, peak of its backward) - Σ saved up to it

    The last layer also has what is `OUTSIDE`: batch and loss. Example: two layers that save 10 bytes each and
    the loss 5, peaks 12 and 24, with the loss 31: works 2 and 31 - 25 = 6.
    """
    found: dict[str, float] = {}
    held = 0.0
    for name in order:
        held += saved(name)
        found[name] = max(0.0, max(peaks.get(name, (0, 0))) - held) if name in peaks else 0.0
    if order and OUTSIDE in peaks:
        found[order[-1]] = max(found[order[-1]], max(peaks[OUTSIDE]) - held)
    return found


def line_through(first: tuple[int, float], second: tuple[int, float]) -> tuple[int, int]:
    """(bytes whatever the samples, bytes a sample) of a line through two (samples, bytes), neither negative.

    Where bytes grow faster than samples there is nothing fixed; where they fall nothing grows. Example: 30
    bytes at 2 samples and 50 at 4 are 10 and 10 a sample.
    """
    (few, low), (many, high) = sorted((first, second))
    slope = (high - low) / (many - few) if many > few else high / many
    slope = min(max(slope, 0.0), high / many)
    return round(max(low - slope * few, high - slope * many, 0.0)), round(slope)


def update_bytes(device: torch.device, update: Callable[[], Any]) -> int:
    """What an optimiser's step takes beyond what was in use before it and stays."""
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    update()
    return max(0, torch.accelerator.max_memory_allocated(device) - before)
