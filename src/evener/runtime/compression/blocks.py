"""8 and 4 bits a value, with one scale for each block and a coin that rounds.

value / scale · 127 + u, rounded down, u drawn from [0, 1): right on average (QSGD, Alistarh et al. 2017)
"""

import torch
from torch import Tensor

BLOCK = 256
_SHIFTS = 2**16
_SMALLEST = 1e-30


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
        largest = torch.abs(rows, out=found).amax(1)
        finite = largest.isfinite()
        scales.copy_(largest / self._most)
        scales[~finite] = float("nan")
        # A block of values so small that this overflows is sent as zeros, and kept.
        factor = torch.where((largest > _SMALLEST) & finite, self._most / largest, torch.zeros_like(largest))
        torch.addcmul(self._coins(rows.numel()).view_as(rows), rows, factor[:, None], out=found)
        found.floor_().clamp_(-self._most, self._most)
        if self._bits == 8:
            levels.view(torch.int8).view_as(rows).copy_(found)
        else:
            both = (found.nan_to_num(0.0) + self._most).to(torch.uint8).view(-1, 2)
            torch.bitwise_or(both[:, 0], both[:, 1] << 4, out=levels)
        if lost is not None:
            kept = torch.addcmul(rows, found, scales[:, None], value=-1.0, out=found)
            lost.copy_(kept.view(-1)[: len(lost)] if bool(finite.all()) else torch.zeros(()))

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

    def decode(self, data: Tensor, out: Tensor) -> None:
        blocks = -(-out.numel() // self._block)
        scales, levels = self._parts(data, blocks)
        if self._bits == 8:
            if out.dtype == torch.float32 and out.is_contiguous() and out.numel() == blocks * self._block:
                torch.mul(levels.view(torch.int8).view(blocks, -1), scales[:, None], out=out.view(blocks, -1))
                return
            found = levels.view(torch.int8).view(blocks, -1) * scales[:, None]
        else:
            both = torch.stack((levels & 15, levels >> 4), dim=1).view(blocks, -1)
            found = (both.float() - self._most) * scales[:, None]
        out.copy_(found.view(-1)[: out.numel()])

    def _rows(self, values: Tensor) -> Tensor:
        own = values.float()
        short = -len(own) % self._block
        if short:
            own = torch.nn.functional.pad(own, (0, short))
        return own.view(-1, self._block)

    def _parts(self, data: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        return data[: 4 * blocks].view(torch.float32), data[4 * blocks :]
