"""Only the largest values travel, with their places; the rest is kept for later (Aji and Heafield 2017)."""

import math

import torch
from torch import Tensor


class Largest:
    """The `part` of largest magnitude, float32 and int32 each. A NaN counts as the largest of all."""

    keeps = True

    def __init__(self, part: float) -> None:
        self._part = part

    def for_place(self) -> "Largest":
        return self

    def num_bytes(self, count: int) -> int:
        return 8 * self._number(count)

    def encode(self, values: Tensor, out: Tensor, lost: Tensor | None = None) -> None:
        number = self._number(values.numel())
        own = values.float()
        places = own.abs().topk(number, sorted=False).indices
        out[: 4 * number].view(torch.float32).copy_(own[places])
        out[4 * number :].view(torch.int32).copy_(places)
        if lost is not None:
            finite = bool(own[places].isfinite().all())
            lost.copy_(own if finite else torch.zeros(()))
            lost[places] = 0.0

    def decode(self, data: Tensor, out: Tensor, *, adds: bool = False) -> None:
        number = len(data) // 8
        places = data[4 * number :].view(torch.int32).long()
        if not adds:
            out.zero_()
        out[places] += data[: 4 * number].view(torch.float32).to(out.dtype)

    def _number(self, count: int) -> int:
        return min(count, max(1, math.ceil(count * self._part))) if count else 0
