"""A ring of bytes in shared memory: messages of one pair lie in it in the order in which they are taken.

    ┌ page ────┬──────────────────────────────────────────┐
    │ consumed │ …free │ message 4 │ message 5 │ free…     │     written ─► end of message 5
    └──────────┴──────────────────────────────────────────┘     consumed ─► end of message 3

The memory has no name: it lives in a file descriptor that is passed to the other process, and is gone with
the last process that holds it, however that ends. A ring that is full is left to the receiver and a new one
of twice the size takes over, so a sender never waits.
"""

import fcntl
import mmap
import os

import torch

from evener.errors import UsageError
from evener.runtime.channels.messages import ALIGNMENT, Layout, views_of

FIRST_RING_BYTES = 2**20
MAX_RING_BYTES = 2**38
_PAGE = 4096
_MOST_VIEWS = 256
# The size is fixed for good: memory that shrank under a reader would end its process.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Ring:
    """One end's view of a ring of `capacity` bytes in `file`, which can be closed afterwards.

    ValueError where the file is not one that `make` made.
    """

    def __init__(self, file: int, capacity: int) -> None:
        if not 0 < capacity <= MAX_RING_BYTES or os.fstat(file).st_size != _PAGE + capacity:
            raise ValueError(f"a ring of {capacity} bytes in a file of {os.fstat(file).st_size}")
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("a ring whose size is not fixed")
        memory = mmap.mmap(file, _PAGE + capacity)
        self.capacity = capacity
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8, offset=_PAGE)
        self._consumed = memoryview(memory)[:8].cast("Q")
        self._written = self._skipped_to = 0
        self._views: dict[tuple[int, bytes], tuple[torch.Tensor, ...]] = {}

    def views(self, start: int, layout: Layout) -> tuple[torch.Tensor, ...]:
        """The tensors of a message that begins at `start`.

        They are kept: most messages lie where one of their kind lay before, and finding them anew takes 5 µs.
        ValueError where the message would lie outside of the ring.
        """
        found = self._views.get((start, layout.packed))
        if found is None:
            if start + layout.num_bytes > self.capacity:
                raise ValueError("its payload lies outside of the ring")
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            found = views_of(layout, self.bytes.narrow(0, start, layout.num_bytes))
            self._views[start, layout.packed] = found
        return found

    def reserve(self, num_bytes: int) -> tuple[int, int] | None:
        """(start, end) for a message of `num_bytes`, or None when the ring has no room.

        `start` is a place in `bytes`; `end` counts on from lap to lap and is what `release` gets back.
        """
        num_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        consumed, start = max(self._consumed[0], self._skipped_to), self._written
        if consumed == start:  # empty: begin a lap, to keep to warm memory
            start += -start % self.capacity
            consumed = self._skipped_to = start
        elif start % self.capacity + num_bytes > self.capacity:  # nothing lies across the end
            start += -start % self.capacity
        end = start + num_bytes
        if end - consumed > self.capacity:
            return None
        self._written = end
        return start % self.capacity, end

    def release(self, end: int) -> None:
        """Everything before `end` has been taken."""
        self._consumed[0] = end


def make(capacity: int) -> tuple[Ring, int]:
    """A new ring and its file descriptor, to be passed on and closed; UsageError above 256 GiB."""
    if capacity > MAX_RING_BYTES:
        raise UsageError(
            "more is on its way between two devices than this host can hold",
            numbers=f"a ring of {capacity >> 30} GiB, at most {MAX_RING_BYTES >> 30}",
            remedy="a schedule in which stages run less far ahead, or smaller micro-batches",
        )
    file = os.memfd_create("evener", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, _PAGE + capacity)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    return Ring(file, capacity), file


def grown(capacity: int, num_bytes: int) -> int:
    """The size of the ring that follows one of `capacity` with no room for `num_bytes`.

    Twice as large, and room for two such messages. Example: grown(2**20, 3_000_000) == 2**23.
    """
    return max(2 * capacity, 1 << (2 * num_bytes - 1).bit_length())
