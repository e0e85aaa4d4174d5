"""The inside of a group whose members share a host's memory: values lie where all can read them.

    member   copies its values into its room ──"piece 3"──► owner adds them from there
    member   copies the sum from there    ◄──"piece 3"──  owner copies the sum into its room

Only the words of what lies ready are messages, so a device that is lost ends every wait as it ends others'.
"""

import mmap
import os
import secrets
import sys
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from evener.core.exchange import PIECE_BYTES, Span
from evener.runtime.wires.messages import Messages

ROOMS = 3
"""Pieces of a track that may be under way at once: while one waits for a slow link, two are inside."""
_MARK_WORDS = 4
HEAD_BYTES = 4096
IS_AVAILABLE = sys.platform == "linux" and hasattr(os, "memfd_create")


class Memory:
    """Rooms of `PIECE_BYTES` by member, each its own to write and all others' to read."""

    def __init__(self, maps: dict[str, Tensor]) -> None:
        self._maps = maps

    def room(self, member: str, number: int, like: Tensor) -> Tensor:
        """Room `number` of `member`, as so many values of that dtype as `like` has."""
        start = HEAD_BYTES + number * PIECE_BYTES
        return self._maps[member][start : start + like.nbytes].view(like.dtype)


def share_memory(group: dist.ProcessGroup, members: Sequence[str], rooms: int) -> Memory | None:
    """Memory that all `members` of `group`, in its order, have in common; None where they have none.

    Called by all of them together. The memory has no name, and is gone with the last process that has it:
    each makes a file, and the others open it by way of its process. Who finds another mark in it than the one
    that was told over the group is on another host, or in another container.
    """
    num_bytes = HEAD_BYTES + rooms * PIECE_BYTES
    mark = [secrets.randbits(62) for _ in range(_MARK_WORDS)]
    file = _made(num_bytes, mark) if IS_AVAILABLE else -1
    try:
        told = [torch.zeros(2 + _MARK_WORDS, dtype=torch.int64) for _ in members]
        group.allgather([told], [torch.tensor([os.getpid(), file, *mark])]).wait()
        maps = {m: _opened(*t.tolist(), num_bytes=num_bytes) for m, t in zip(members, told, strict=True)}
        found = {m: memory for m, memory in maps.items() if memory is not None}
        all_have_all = torch.tensor([int(len(found) == len(members))])
        group.allreduce([all_have_all], dist.ReduceOp.MIN).wait()
        return Memory(found) if all_have_all else None
    finally:
        if file >= 0:
            os.close(file)


def _made(num_bytes: int, mark: Sequence[int]) -> int:
    file = os.memfd_create("evener", os.MFD_CLOEXEC)
    os.ftruncate(file, num_bytes)
    os.write(file, torch.tensor(mark).numpy().tobytes())
    return file


def _opened(process: int, file: int, *mark: int, num_bytes: int) -> Tensor | None:
    """The memory of another process's file; None where it cannot be had, or is not the one meant."""
    if file < 0:
        return None
    try:
        ours = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(ours).st_size != num_bytes:
            return None
        memory = torch.frombuffer(mmap.mmap(ours, num_bytes), dtype=torch.uint8)
    finally:
        os.close(ours)
    return memory if memory[: 8 * len(mark)].view(torch.int64).tolist() == list(mark) else None


class SharedInside:
    """As `MessagesInside`, for members that share `memory`, in which its rooms begin at `first`.

    A room is written anew only when nobody reads it any more: what a member put there is read before the sum
    comes back, and a member tells of a piece only when it has the sum of the one `ROOMS` before.
    """

    def __init__(
        self,
        memory: Memory,
        first: int,
        there: Messages,
        back: Messages,
        members: Sequence[str],
        owners: Sequence[str],
    ) -> None:
        self._memory, self._first, self._there, self._back = memory, first, there, back
        self._members, self._owners, self._here = tuple(members), tuple(owners), there.here
        self._others = tuple(m for m in members if m != there.here)
        self._place = self._members.index(there.here)
        self._collected = self._spread = 0
        self._free = threading.Semaphore(ROOMS)

    def collect(self, piece: Tensor, number: int, spans: Sequence[Span]) -> None:
        self._free.acquire()
        turn, self._collected = self._first + self._collected % ROOMS, self._collected + 1
        mine, theirs = self._shared_out(spans)
        room = self._memory.room(self._here, turn, piece)
        for spans_of_one in theirs.values():
            for a, b in spans_of_one:
                room[a:b].copy_(piece[a:b])
        sent = [_tell(self._there, owner, piece, number) for owner in theirs]
        if mine:
            expected = {m: self._there.expect(m) for m in self._others}
            for m, work in expected.items():
                self._there.receive(m, work, 0, piece, number)
            rooms = [piece if m == self._here else self._memory.room(m, turn, piece) for m in self._members]
            for a, b in mine:
                _add([r[a:b] for r in rooms], self._place)
        _wait(sent)

    def spread(self, piece: Tensor, number: int, spans: Sequence[Span]) -> None:
        turn, self._spread = self._first + ROOMS + self._spread % ROOMS, self._spread + 1
        mine, theirs = self._shared_out(spans)
        sent = []
        if mine:
            room = self._memory.room(self._here, turn, piece)
            for a, b in mine:
                room[a:b].copy_(piece[a:b])
            sent = [_tell(self._back, m, piece, number) for m in self._others]
        for owner, spans_of_one in theirs.items():
            self._back.receive(owner, self._back.expect(owner), 0, piece, number)
            room = self._memory.room(owner, turn, piece)
            for a, b in spans_of_one:
                piece[a:b].copy_(room[a:b])
        _wait(sent)
        self._free.release()

    def give_up(self) -> None:
        """Wait for no room any more: nothing of what is under way will be spread."""
        self._free.release(2**20)

    def _shared_out(self, spans: Sequence[Span]) -> tuple[list[Span], dict[str, list[Span]]]:
        """The spans that this device owns, and those of others by owner, without the empty ones."""
        theirs: dict[str, list[Span]] = {}
        for (a, b), owner in zip(spans, self._owners, strict=True):
            if b > a:
                theirs.setdefault(owner, []).append((a, b))
        return theirs.pop(self._here, []), theirs


def _add(values: list[Tensor], place: int) -> None:
    """Leave the sum of all, added in their order, in the one at `place`."""
    total, own = values[place], values[place].clone() if place > 1 else values[place]
    terms = [own if i == place else v for i, v in enumerate(values)]
    torch.add(terms[0], terms[1], out=total)
    for term in terms[2:]:
        total.add_(term)


def _tell(messages: Messages, to: str, piece: Tensor, number: int) -> object:
    messages.outgoing(to, 0)
    return messages.send(to, 0, piece, number)


def _wait(sent: list) -> None:
    while sent:
        sent.pop().wait()
