"""Parcels over the links of the fleet file: they really travel, the moment they are there is computed.

With each goes when it was handed in. A device that waits for a buffer goes on when its links would have
brought it, after what it waited for before:

    owner     ●handed in
    here           ●asked for ──── waits ──┤ there = max(handed in, asked for, last one there) + handover
"""

from collections.abc import Mapping, Sequence
from functools import cache

import torch

from evener.core.fleet import Fleet
from evener.core.ownership import handover
from evener.core.seams import Arriving, Pending, Post
from evener.rehearsal.pacer import Pacer

_STAMP = 0x40000000  # the tag of a parcel's stamp is its own with this bit


class PacedPost:
    """A `Post` over `inner` that takes the seconds of `handover` on the clock of `driver`'s device."""

    def __init__(self, inner: Post, driver: Pacer, fleet: Fleet) -> None:
        self._inner, self._driver = inner, driver
        self._free_s = {False: 0.0, True: 0.0}  # by way: when the last buffer was there
        self._now = 0.0
        self._handover = cache(lambda parts, adds: handover(dict(parts), fleet, adds=adds))

    def send(self, values: torch.Tensor, to: str, tag: int) -> Pending:
        """Hand in `values` now; see `Post.send`."""
        stamp = torch.tensor([self._now], dtype=torch.float64)
        return _Both([self._inner.send(stamp, to, tag | _STAMP), self._inner.send(values, to, tag)])

    def receive(self, values: torch.Tensor, source: str, tag: int) -> Arriving:
        """Ask for a parcel; `reach` says when it is there."""
        stamp = torch.zeros(1, dtype=torch.float64)
        coming = self._inner.receive(stamp, source, tag | _STAMP)
        return _Stamped(stamp, coming, self._inner.receive(values, source, tag))

    def now(self) -> float | None:
        """The moment of the next `send` and `receive`, in the middle of an action too."""
        self._now = self._driver.launch()
        return self._now

    def reach(self, since_s: Sequence[float | None], sizes: Mapping[str, int], *, adds: bool) -> None:
        """The device waits until a buffer of these bytes by owner would be there."""
        self._driver.launch()
        began_s = [s for s in since_s if s is not None]
        if not began_s:
            return
        takes_s = self._handover(tuple(sizes.items()), adds).seconds(sum(sizes.values()))
        self._free_s[adds] = max(self._free_s[adds], *began_s) + takes_s
        self._driver.advance(self._free_s[adds])


class _Both:
    def __init__(self, pending: list[Pending]) -> None:
        self._pending = pending

    def wait(self) -> None:
        while self._pending:
            self._pending.pop().wait()


class _Stamped:
    def __init__(self, stamp: torch.Tensor, coming: Arriving, values: Arriving) -> None:
        self._stamp, self._parts = stamp, [coming, values]
        self.sent_s: float | None = None

    def wait(self) -> None:
        while self._parts:
            self._parts.pop().wait()
        self.sent_s = float(self._stamp)
