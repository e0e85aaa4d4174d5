"""What groups sum between them: flat buffers in host memory, and a few numbers that stay exact."""

from collections.abc import Sequence

import torch
from torch import Tensor

from evener.core.seams import Pending, Wire
from evener.runtime.wires.grouped import GroupedWire


class Flat:
    """Values like those of `tensors`, as few flat buffers on the host: float64 for float64, else float32."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._views: list[Tensor] = [torch.empty(0)] * len(tensors)
        self.buffers: list[Tensor] = []
        plain = [_real(t) for t in tensors]
        for dtype in (torch.float32, torch.float64):
            which = [i for i, t in enumerate(plain) if _wide(t) == dtype]
            if not which:
                continue
            buffer = torch.zeros(sum(plain[i].numel() for i in which), dtype=dtype)
            self.buffers.append(buffer)
            for i, view in zip(which, buffer.split([plain[i].numel() for i in which]), strict=True):
                self._views[i] = view.view(plain[i].shape)

    @property
    def views(self) -> list[Tensor]:
        """By tensor, its values in the buffers; a complex one as pairs of reals."""
        return self._views

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values of `tensors` in here."""
        for view, t in zip(self._views, tensors, strict=True):
            view.copy_(_real(t))

    def give(self, tensors: Sequence[Tensor]) -> None:
        """Copy these values into `tensors`."""
        for view, t in zip(self._views, tensors, strict=True):
            _real(t).copy_(view)

    def set_to(self, other: "Flat") -> None:
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            mine.copy_(theirs)

    def add(self, other: "Flat", factor: float = 1.0) -> None:
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            mine.add_(theirs, alpha=factor)

    def multiply(self, factor: float) -> None:
        for buffer in self.buffers:
            buffer.mul_(factor)

    def zero(self) -> None:
        for buffer in self.buffers:
            buffer.zero_()

    @property
    def is_finite(self) -> bool:
        # A sum is NaN or infinite if one of its terms is: ten times as fast as looking at each.
        return all(bool(torch.isfinite(buffer.sum(dtype=torch.float64))) for buffer in self.buffers)


class Between:
    """Sums over groups of what all members of a group have alike; started in one order on all devices.

    Members of one group get the same bits, and so do all groups.
    """

    def __init__(self, wire: Wire, grouped: GroupedWire | None = None) -> None:
        self._wire, self._grouped = wire, grouped

    def start(self, name: str, flat: Flat, numbers: Tensor) -> "Summing":
        """Start summing `flat` and `numbers` (float64, never compressed) in place; `name` says of what."""
        pending = [
            self._wire.all_reduce(buffer, f"between groups, {name} {i}")
            for i, buffer in enumerate(flat.buffers)
        ]
        told = self._wire.all_reduce(numbers, f"between groups, {name} numbers", exact_tail=len(numbers))
        return Summing([*pending, told], self._grouped)


class Summing:
    """A sum between groups on its way; one at a time."""

    def __init__(self, pending: list[Pending], grouped: GroupedWire | None) -> None:
        self._pending, self._grouped = pending, grouped

    def wait(self) -> None:
        """Return when all of it is here; what compression lost then goes with the next sum."""
        while self._pending:  # one that is kept after an error keeps the group's sockets open
            self._pending.pop(0).wait()
        if self._grouped:
            self._grouped.settle(counts=True)


def _wide(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t.detach()) if t.is_complex() else t.detach()
