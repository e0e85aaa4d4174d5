"""Parcels over a torch.distributed group: Gloo moves a message only when it is asked for.

So an owner hands in, at the start of a step, every parcel of its parameters that others will need in it, and
each device takes them layer by layer when it gets there: nobody meets anybody, and nobody holds them twice.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evener.core.seams import Arriving, Pending
from evener.errors import PeerLostError


class GroupPost:
    """A `Post` among `devices`, the members of `group` in order."""

    def __init__(self, group: dist.ProcessGroup | None, devices: Sequence[str]) -> None:
        self._group, self._places = group, {d: i for i, d in enumerate(devices)}

    def send(self, values: Tensor, to: str, tag: int) -> Pending:
        assert self._group is not None, "a device alone sends nothing"
        try:
            return _Parcel(self._group.send([_plain(values)], self._places[to], tag), f"a part sent to {to}")
        except RuntimeError as e:
            raise lost(f"a part sent to {to}", e) from e

    def receive(self, values: Tensor, source: str, tag: int) -> Arriving:
        assert self._group is not None, "a device alone asks for nothing"
        try:
            work = self._group.recv([_plain(values)], self._places[source], tag)
            return _Parcel(work, f"a part that {source} owns")
        except RuntimeError as e:
            raise lost(f"a part that {source} owns", e) from e

    def now(self) -> float | None:
        return None

    def reach(self, since_s: Sequence[float | None], sizes: Mapping[str, int], *, adds: bool) -> None:
        return


class _Parcel:
    sent_s: float | None = None

    def __init__(self, work: Any, what: str) -> None:
        self._work, self._what = work, what

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as e:
            raise lost(self._what, e) from e


def lost(what: str, cause: BaseException) -> PeerLostError:
    """The error of a parcel whose other end is gone."""
    first_line = (str(cause).splitlines() or [type(cause).__name__])[0].partition(". This is typically")[0]
    return PeerLostError(
        f"{what} did not arrive: another device left or went silent ({first_line})",
        remedy="look for the first error of the other devices; start again from a checkpoint (--resume)",
    )


def _plain(values: Tensor) -> Tensor:
    """Gloo knows no complex numbers, and takes bytes of every dtype."""
    return values.view(torch.uint8)
