"""What every way of compressing gives: how many bytes, there and back. And the error that is kept for later.

    step n     value + kept error ──encode──► bytes      kept error = value + kept error - what the bytes say
    step n+1   …

With the error kept (Seide et al. 2014; Karimireddy et al. 2019, "Error feedback fixes SignSGD") nothing of a
gradient is lost, it only comes later.
"""

from typing import Protocol

import torch
from torch import Tensor

from evener.errors import UsageError
from evener.runtime.compression.blocks import Blocks
from evener.runtime.compression.half import Half
from evener.runtime.compression.largest import Largest


class Codec(Protocol):
    """Values to bytes and back; the same number of bytes for the same number of values, on every device.

    NaN and infinity among the values must come out as NaN or infinity, in their place or around it. `keeps`
    says whether what is lost is to be added to the next values.
    """

    keeps: bool

    def num_bytes(self, count: int) -> int:
        """Bytes of `count` values."""
        ...

    def encode(self, values: Tensor, out: Tensor, lost: Tensor | None = None) -> None:
        """Write `values` (flat) as bytes to `out`, of `num_bytes(len(values))`.

        Where the codec `keeps`, `lost` gets what the bytes do not say of each value, float32: zeros where
        any value is NaN or infinite, for such a step will not count. It may be `values` itself.
        """
        ...

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Write what `data` says to `out`, flat, in its dtype."""
        ...


NAMES = ("bf16", "fp16", "int8", "int4", "top1%")


def codec_of(name: str, seed: int) -> Codec:
    """The codec called `name`; `seed` is of what it rounds by, and every device's own. UsageError: unknown.

    Example: codec_of("int8", 0).num_bytes(256) = 260: a byte a value and a scale a block.
    """
    if name in ("bf16", "fp16"):
        return Half(torch.bfloat16 if name == "bf16" else torch.float16)
    if name in ("int8", "int4"):
        return Blocks(8 if name == "int8" else 4, seed)
    if name == "top1%":
        return Largest(0.01)
    raise UsageError(f"no compression is called {name!r}", remedy=f"one of {', '.join(NAMES)}")


class Feedback:
    """Encodes with what was lost before added, where the codec keeps it; one for each use of a wire."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._lost: dict[tuple, Tensor] = {}

    def encode(self, place: tuple, values: Tensor, out: Tensor) -> None:
        """As the codec; `place` says which values these are, the same in every step."""
        if not self.codec.keeps:
            self.codec.encode(values, out)
            return
        named = (*place, len(values))  # another buffer of the same name keeps its own
        kept = self._lost.get(named)
        if kept is None:
            kept = self._lost[named] = torch.zeros(len(values))
        kept.add_(values)
        self.codec.encode(kept, out, kept)
