"""Messages between the members of a process group: each says what it is before what it brings.

    [ magic | number | values | dtype | bytes | 0 0 0 ]  payload …

A receiver always offers room for the largest message: Gloo ends the process when a message is larger than
the room for it, and takes smaller ones. So devices that disagree in size or dtype learn it from the header.
It offers that one message ahead: Gloo sends only what is waited for, and the word of that would go behind
all that is on its way over a slow link already.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evener.core.exchange import PIECE_BYTES
from evener.errors import ReductionMismatchError
from evener.runtime.ranks import PATIENCE

HEADER_BYTES = 64
ROOM_BYTES = HEADER_BYTES + PIECE_BYTES + 4096
_MAGIC = 0x65766E72
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)


class Outgoing:
    """A message under way: `wait` before its buffer is used again."""

    def __init__(self, work: Any, buffer: Tensor) -> None:
        self._work, self._buffer = work, buffer

    def wait(self) -> None:
        work, self._work = self._work, None
        work.wait(PATIENCE)


class Messages:
    """Sends and receives among `devices`, the members of `group` in order; one tag, so one order a pair."""

    def __init__(self, group: dist.ProcessGroup, devices: Sequence[str], here: str, tag: int) -> None:
        self._group, self._devices, self.here, self._tag = group, tuple(devices), here, tag
        self._coming: dict[str, deque[tuple[Any, Tensor]]] = {}
        self._rooms: dict[str, Tensor] = {}  # by source, that of the message last expected
        self._outs: dict[tuple[str, int], Tensor] = {}

    def outgoing(self, to: str, num_bytes: int, slot: int = 0) -> Tensor:
        """Where the payload of the next message to `to` is to be written; bytes.

        Messages under way at once need slots of their own.
        """
        if (to, slot) not in self._outs:
            self._outs[to, slot] = _room()
        return self._outs[to, slot][HEADER_BYTES : HEADER_BYTES + num_bytes]

    def send(self, to: str, num_bytes: int, values: Tensor, number: int, slot: int = 0) -> Outgoing:
        """Send what was written to `outgoing(to, num_bytes, slot)`; `values` are those it stands for."""
        room = self._outs[to, slot]
        head = [_MAGIC, number, values.numel(), DTYPES.index(values.dtype), num_bytes, 0, 0, 0]
        room[:HEADER_BYTES].view(torch.int64).copy_(torch.tensor(head))
        message = room[: HEADER_BYTES + num_bytes]
        work = self._group.send([message], self._devices.index(to), self._tag)
        return Outgoing(work, message)

    def expect(self, source: str) -> Any:
        """The next message of `source`, waited for in `receive`. The one before must have been used."""
        coming = self._coming.setdefault(source, deque())
        spare = self._rooms.get(source)
        while len(coming) < 2:
            room, spare = (_room() if spare is None else spare), None
            coming.append((self._group.recv([room], self._devices.index(source), self._tag), room))
        work, self._rooms[source] = coming.popleft()
        return work

    def receive(self, source: str, work: Any, num_bytes: int | None, values: Tensor, number: int) -> Tensor:
        """The payload of the message that `work` expects, which must stand for values like `values`.

        It must have `num_bytes`, or with None at most as many as these values have.
        """
        work.wait(PATIENCE)
        room = self._rooms[source]
        magic, told, count, dtype, size, *_ = room[:HEADER_BYTES].view(torch.int64).tolist()
        if num_bytes is None:
            num_bytes = min(size, values.nbytes)
        wanted = (_MAGIC, number, values.numel(), DTYPES.index(values.dtype), num_bytes)
        if (magic, told, count, dtype, size) != wanted:
            theirs = str(DTYPES[dtype]) if 0 <= dtype < len(DTYPES) else "an unknown dtype"
            here = f"{values.numel()} {values.dtype}" + (f" in {num_bytes} bytes" if num_bytes else "")
            there = f"{count} {theirs}" + (f" in {size} bytes" if size else "")
            raise ReductionMismatchError(
                f"{self.here} and {source} do not sum the same thing",
                numbers=f"piece {number} of {here} here, piece {told} of {there} there",
                remedy="the same model, dtype, plan and version of evener on all devices",
            )
        return room[HEADER_BYTES : HEADER_BYTES + num_bytes]


def _room() -> Tensor:
    return torch.empty(ROOM_BYTES, dtype=torch.uint8)
