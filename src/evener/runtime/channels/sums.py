"""Sums of a few numbers over the channel: each device sends its own to all others, and all add alike.

    a ──► b, c      b ──► a, c      c ──► a, b       then everywhere  a + b + c, in this order

Where a channel is open anyway this takes a third of what a reduction over Gloo takes, whose threads must all
wake up first; and like every wait of a channel it can be ended from outside. The messages grow with the
square of the devices, so it is for few of them.
"""

import torch

from evener.core.seams import Channel, Pending
from evener.errors import ReductionMismatchError
from evener.runtime.ranks import Ranks

MOST_DEVICES = 4


class ChannelWire:
    """A `Wire` for small buffers in host memory; see `Wire.all_reduce` in `core/seams.py` for its errors."""

    def __init__(self, channel: Channel, ranks: Ranks) -> None:
        self._channel, self._ranks = channel, ranks

    def all_reduce(self, buffer: torch.Tensor, key: str, *, exact_tail: int = 0) -> Pending:
        """Tell all others; the sum is in `buffer` when it was waited for."""
        own = buffer.clone()  # what was handed over to a device of this process must not change
        named = f"sum of {key}"
        others = [d for d in self._ranks.devices if d != self._ranks.here]
        sent = [self._channel.send((own,), d, named) for d in others]
        return _Sum(self._channel, self._ranks, named, own, buffer, sent)


class _Sum:
    def __init__(
        self,
        channel: Channel,
        ranks: Ranks,
        key: str,
        own: torch.Tensor,
        buffer: torch.Tensor,
        sent: list[Pending],
    ) -> None:
        self._channel, self._ranks, self._key = channel, ranks, key
        self._own, self._buffer, self._sent = own, buffer, sent

    def wait(self) -> None:
        """Add what the others sent, in one order everywhere; the second call does nothing."""
        sent, self._sent = self._sent, []
        if not sent:
            return
        self._buffer.zero_()
        for device in self._ranks.devices:
            self._buffer += self._own if device == self._ranks.here else self._from(device)
        for pending in sent:
            pending.wait()

    def _from(self, device: str) -> torch.Tensor:
        tensors = self._channel.receive(device, self._key, device=self._own.device).wait()
        if [(t.shape, t.dtype) for t in tensors] != [(self._own.shape, self._own.dtype)]:
            raise ReductionMismatchError(
                f"{self._ranks.here} and {device} add different numbers of values in {self._key}",
                numbers=f"{tuple(self._own.shape)} here, {[tuple(t.shape) for t in tensors]} there",
                remedy="the same recipe and version of evener on all devices",
            )
        return tensors[0]
