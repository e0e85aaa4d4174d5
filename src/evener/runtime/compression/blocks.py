"""8 and 4 bits a value, with one scale for each block and a coin that rounds.

value / scale · 127 + u, rounded down, u drawn from [0, 1): right on average (QSGD, Alistarh et al. 2017)
"""

import torch
from torch import Tensor

BLOCK = 256
_SHIFTS = 2**16
_SMALLEST = 1e-30
_INSIDE = 1 - 2**-20  # of the largest level: so that rounding an exact one never leads beyond it


class Blocks:
    """Whole numbers in ±127 or ±7 and a float32 scale for each block of 256 values (64 with 4 bits).

    A block with a NaN or an infinity comes out as NaN throughout.
    """

    keeps = True

    def __init__(self, bits: int, seed: int) -> None:
        self._bits, self._block = bits, BLOCK if bits == 8 else BLOCK // 4
        self._most = 2 ** (bits - 1) - 1
        self._generator = torch.Generator().manual_seed(seed)
        self._found = torch.empty(0)
        self._draws = torch.empty(0)  # used shifted by chance: drawing anew is a third of the time

    def for_place(self) -> "Blocks":
        return self

    def num_bytes(self, count: int) -> int:
        blocks = -(-count // self._block)
        return 4 * blocks + blocks * self._block * self._bits // 8

    def encode(self, values: Tensor, out: Tensor, lost: Tensor | None = None) -> None:
        rows = self._rows(values)
        scales, levels = self._parts(out, len(rows))
        found = self._space(rows.numel()).view_as(rows)
        # Not torch's norm: that takes twelve times as long along rows.
        largest = torch.maximum(rows.amax(1), -rows.amin(1))
        finite = largest.isfinite()
        most = self._most * _INSIDE
        scales.copy_(largest / most)
        scales[~finite] = float("nan")
        # A block of values so small that this overflows is sent as zeros, and kept.
        factor = torch.where((largest > _SMALLEST) & finite, most / largest, torch.zeros_like(largest))
        torch.addcmul(self._coins(rows.numel()).view_as(rows), rows, factor[:, None], out=found)
        found.floor_()
        if self._bits == 8:
            levels.view(torch.int8).view_as(rows).copy_(found)
        else:
            both = (found.nan_to_num(0.0) + self._most).to(torch.uint8).view(-1, 2)
            torch.bitwise_or(both[:, 0], both[:, 1] << 4, out=levels)
        if lost is not None:
            if not bool(finite.all()):
                lost.zero_()
            elif len(lost) == rows.numel():
                torch.addcmul(rows, found, scales[:, None], value=-1.0, out=lost.view_as(rows))
            else:
                kept = torch.addcmul(rows, found, scales[:, None], value=-1.0, out=found)
                lost.copy_(kept.view(-1)[: len(lost)])

    def _space(self, count: int) -> Tensor:
        """Room for `count` values on the way: new memory for each piece takes longer than the sums in it."""
        if self._found.numel() < count:
            self._found = torch.empty(count)
        return self._found[:count]

    def _coins(self, count: int) -> Tensor:
        if self._draws.numel() < count + _SHIFTS:
            self._draws = torch.rand(count + _SHIFTS, generator=self._generator)
        start = int(torch.randint(_SHIFTS, (), generator=self._generator))
        return self._draws[start : start + count]

    def decode(self, data: Tensor, out: Tensor, *, adds: bool = False) -> None:
        blocks = -(-out.numel() // self._block)
        scales, levels = self._parts(data, blocks)
        if self._bits == 8:
            whole = levels.view(torch.int8).view(blocks, -1)
        else:
            whole = torch.stack((levels & 15, levels >> 4), dim=1).view(blocks, -1).float() - self._most
        if out.dtype == torch.float32 and out.is_contiguous() and out.numel() == blocks * self._block:
            rows = out.view(blocks, -1)
            if adds:
                torch.addcmul(rows, whole, scales[:, None], out=rows)
            else:
                torch.mul(whole, scales[:, None], out=rows)
            return
        found = (whole * scales[:, None]).view(-1)[: out.numel()]
        (out.add_ if adds else out.copy_)(found)

    def _rows(self, values: Tensor) -> Tensor:
        own = values.float()
        short = -len(own) % self._block
        if short:
            own = torch.nn.functional.pad(own, (0, short))
        return own.view(-1, self._block)

    def _parts(self, data: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        return data[: 4 * blocks].view(torch.float32), data[4 * blocks :]
