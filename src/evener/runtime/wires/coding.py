"""How the values of a lane are written as bytes: as they are, in fewer bytes, or in fewer bits."""

from typing import Protocol

from torch import Tensor

from evener.core.exchange import LOSSLESS, Lane
from evener.runtime.compression.codec import Feedback, codec_of
from evener.runtime.compression.lossless import packed, unpack


class Coding(Protocol):
    """Values to a message and back; `loses` where what comes out is not, bit for bit, what went in."""

    loses: bool

    def most_bytes(self, values: Tensor) -> int:
        """Bytes that a message of `values` has at most."""
        ...

    def expected_bytes(self, values: Tensor) -> int | None:
        """Bytes that a message of values like `values` has; None where that depends on them."""
        ...

    def encode(self, place: tuple, values: Tensor, out: Tensor) -> int:
        """Write `values` to `out`, of `most_bytes`, and say how many bytes that took.

        `place` says which values these are, the same in every step.
        """
        ...

    def decode(self, payload: Tensor, out: Tensor, *, adds: bool) -> None:
        """Write what `payload` says to `out`, or add it to what is there."""
        ...


class Plain:
    """Values as they are."""

    loses = False

    def most_bytes(self, values: Tensor) -> int:
        return values.nbytes

    def expected_bytes(self, values: Tensor) -> int | None:
        return values.nbytes

    def encode(self, place: tuple, values: Tensor, out: Tensor) -> int:
        out.view(values.dtype).copy_(values)
        return values.nbytes

    def decode(self, payload: Tensor, out: Tensor, *, adds: bool) -> None:
        came = payload.view(out.dtype)
        if adds:
            out.add_(came)
        else:
            out.copy_(came)


class Lossless:
    """All bits in as few bytes as these values allow."""

    loses = False

    def most_bytes(self, values: Tensor) -> int:
        return values.nbytes

    def expected_bytes(self, values: Tensor) -> int | None:
        return None

    def encode(self, place: tuple, values: Tensor, out: Tensor) -> int:
        return packed(values, out)

    def decode(self, payload: Tensor, out: Tensor, *, adds: bool) -> None:
        unpack(payload, out, adds=adds)


class Lossy:
    """Fewer bits, with what was lost kept for the next step where the codec does that."""

    loses = True

    def __init__(self, feedback: Feedback) -> None:
        self.feedback = feedback

    def most_bytes(self, values: Tensor) -> int:
        return self.feedback.codec.num_bytes(len(values))

    def expected_bytes(self, values: Tensor) -> int | None:
        return self.most_bytes(values)

    def encode(self, place: tuple, values: Tensor, out: Tensor) -> int:
        self.feedback.encode(place, values, out)
        return len(out)

    def decode(self, payload: Tensor, out: Tensor, *, adds: bool) -> None:
        self.feedback.codec.decode(payload, out, adds=adds)


PLAIN = Plain()


def codings_of(lane: Lane, seed: int) -> tuple[Coding, Coding]:
    """That of each round of `lane`, whose thread is its only user; `seed` is of what it rounds by."""
    if lane.compression is None:
        return PLAIN, PLAIN
    if lane.compression == LOSSLESS:
        return Lossless(), Lossless()
    there, back = (Lossy(Feedback(codec_of(lane.compression, seed + i))) for i in (0, 1))
    return there, back
