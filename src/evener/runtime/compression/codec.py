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
from evener.runtime.compression.lowrank import LowRank


class Codec(Protocol):
    """Values to bytes and back; the same number of bytes for the same number of values, on every device.

    NaN and infinity among the values must come out as NaN or infinity, in their place or around it. `keeps`
    says whether what is lost is to be added to the next values.
    """

    keeps: bool

    def for_place(self) -> "Codec":
        """The codec for values of one place through all steps: itself, unless it goes on from its last."""
        ...

    def num_bytes(self, count: int) -> int:
        """Bytes of `count` values."""
        ...

    def encode(self, values: Tensor, out: Tensor, lost: Tensor | None = None) -> None:
        """Write `values` (flat) as bytes to `out`, of `num_bytes(len(values))`.

        Where the codec `keeps`, `lost` gets what the bytes do not say of each value, float32: zeros where
        any value is NaN or infinite, for such a step will not count. It may be `values` itself.
        """
        ...

    def decode(self, data: Tensor, out: Tensor, *, adds: bool = False) -> None:
        """Write what `data` says to `out`, flat, in its dtype; with `adds` add it to what is there."""
        ...


RANKS = {"powersgd1": 1, "powersgd2": 2, "powersgd4": 4}
NAMES = ("bf16", "fp16", "int8", "int4", "top1%", *RANKS)


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
    if name in RANKS:
        return LowRank(RANKS[name], seed)
    raise UsageError(f"no compression is called {name!r}", remedy=f"one of {', '.join(NAMES)}")


class Feedback:
    """Encodes with what was lost before added, where the codec keeps it; one for each use of a wire.

    What was kept before the step is held until `settle`: a step that does not count must not have sent
    anything.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._places: dict[tuple, _Place] = {}
        self._sent: dict[tuple, None] = {}

    def encode(self, place: tuple, values: Tensor, out: Tensor) -> None:
        """As the codec; `place` says which values these are, the same in every step."""
        if not self.codec.keeps:
            self.codec.encode(values, out)
            return
        named = (*place, len(values))  # another buffer of the same name keeps its own
        at = self._places.get(named)
        if at is None:
            at = self._places[named] = _Place(self.codec.for_place(), len(values))
        self._sent[named] = None
        torch.add(at.kept, values, out=at.other)
        at.codec.encode(at.other, out, at.other)
        at.turn()

    def kept_errors(self) -> list[Tensor]:
        """What is to be added to the next values, place by place."""
        return [at.kept for at in self._places.values()]

    def settle(self, *, counts: bool, factor: float = 1.0) -> None:
        """The step is over. Where it does not count, what was kept before it is kept again.

        `factor` is the next step's loss scale over this one's: what is kept is of gradients times that.
        """
        for named in self._sent if not counts else ():
            self._places[named].turn()
        self._sent.clear()
        if factor != 1.0:
            for at in self._places.values():
                at.kept.mul_(factor)


class _Place:
    """What is kept for some values: of the last step, and of the one before."""

    def __init__(self, codec: Codec, count: int) -> None:
        self.codec = codec
        self.kept, self.other = torch.zeros(count), torch.zeros(count)

    def turn(self) -> None:
        self.kept, self.other = self.other, self.kept
