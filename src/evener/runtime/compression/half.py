"""bfloat16 and float16 on the wire: half the bytes, 8 or 11 bits of precision."""

import math

import torch
from torch import Tensor

_LARGEST = 2.0**15


class Half:
    """Rounds to nearest. float16 travels with a power of two that brings the largest value in its range."""

    keeps = False

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._scaled = dtype == torch.float16

    def for_place(self) -> "Half":
        return self

    def num_bytes(self, count: int) -> int:
        return 2 * count + 4

    def encode(self, values: Tensor, out: Tensor, lost: Tensor | None = None) -> None:
        scale = 1.0
        if self._scaled and values.numel():
            most = float(values.abs().max())
            if math.isfinite(most) and most > 0:
                scale = 2.0 ** max(-126, min(126, math.ceil(math.log2(most / _LARGEST))))
        out[:4].view(torch.float32).fill_(scale)
        out[4:].view(self._dtype).copy_(values if scale == 1.0 else values / scale)

    def decode(self, data: Tensor, out: Tensor, *, adds: bool = False) -> None:
        scale = float(data[:4].view(torch.float32)) if self._scaled else 1.0
        found = data[4:].view(self._dtype)
        if adds:
            out.add_(found, alpha=scale)
            return
        out.copy_(found)
        if scale != 1.0:
            out.mul_(scale)
