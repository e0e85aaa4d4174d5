"""The device of this process: its memory, its clock, its roofline and its link to the host."""

import contextlib
import gc
from collections import deque

import torch

from evener.core.figures import Curve
from evener.core.fleet import Device
from evener.rehearsal.device.clock import Clock
from evener.rehearsal.device.flights import Flights
from evener.rehearsal.device.memory import Block, Memory, OutOfRoom, Sizes
from evener.rehearsal.device.roofline import Roofline
from evener.rehearsal.device.tensor import NAME, Room, room_at


class Card:
    """`device` of a fleet file as torch's device `rehearsal:0`.

    Its memory is `memory_bytes` less `framework_bytes`; without the former it has no end. Copies between host
    and device take `host_link` (None: no time). `expandable` is the allocator's setting of that name.
    """

    def __init__(
        self,
        device: Device,
        host_link: Curve | None = None,
        *,
        clock: Clock | None = None,
        expandable: bool = False,
    ) -> None:
        self.device, self.host_link = device, host_link
        self.torch_device = torch.device(NAME, 0)
        self.clock = clock or Clock()
        self.roofline = Roofline(device)
        self.flights = Flights(self.clock)
        self.total_bytes = int(device.memory_bytes.value) if device.memory_bytes else None
        self.framework_bytes = int(device.framework_bytes.value) if device.framework_bytes else 0
        smaller = device.rehearsed.smaller if device.rehearsed else 1.0
        cap = None if self.total_bytes is None else self.total_bytes - self.framework_bytes
        self._memory = Memory(cap, Sizes().smaller(smaller) if smaller > 1 else None, expandable=expandable)
        self.num_calls = 0  # operations that came through
        self.factor = 1.0  # times what the roofline says
        self._freed: deque[Block] = deque()
        self._muted = 0
        self.timed = True

    @property
    def memory(self) -> Memory:
        """The memory, with all that was freed up to now given back."""
        freed = self._freed
        while freed:
            self._memory.free(freed.popleft())
        return self._memory

    @property
    def muted(self) -> bool:
        """Whether operations are not the device's: they take no time."""
        return self._muted > 0 or not self.timed

    @contextlib.contextmanager
    def aside(self):
        """Operations inside take no time on the device's clock."""
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    @contextlib.contextmanager
    def lifted(self):
        """Inside, memory has no end: what no card could hold can be measured all the same."""
        cap, self._memory.cap_bytes = self._memory.cap_bytes, None
        try:
            yield
        finally:
            self._memory.cap_bytes = cap

    def room(self, storage: torch.UntypedStorage) -> Room | None:
        """The room of `storage`, taken now if it has none; torch.OutOfMemoryError when there is none left."""
        address = storage._cdata
        room = room_at(address)
        if room is None:
            num_bytes = storage.nbytes()
            if not num_bytes:
                return None
            # Freed rooms are queued: a collection may run in the middle of taking one.
            room = Room(address, num_bytes, self._block, self._freed.append)
        return room

    def copied(self, num_bytes: int, *, inwards: bool) -> float:
        """Queue a copy between host and device; when it ends."""
        if self.muted:
            return self.clock.host_s
        seconds = self.host_link.seconds(num_bytes) if self.host_link else 0.0
        return self.clock.queue(seconds * self.factor, "in" if inwards else "out")

    def _block(self, num_bytes: int) -> Block:
        try:
            return self.memory.take(num_bytes)
        except OutOfRoom:
            gc.collect()
        try:
            return self.memory.take(num_bytes)
        except OutOfRoom:
            raise torch.OutOfMemoryError(self._full(num_bytes)) from None

    def _full(self, num_bytes: int) -> str:
        memory = self._memory
        assert self.total_bytes is not None
        free = self.total_bytes - self.framework_bytes - memory.reserved.current
        return (
            f"REHEARSAL out of memory. Tried to allocate {_mib(num_bytes)}. {self.device.name} has a total "
            f"capacity of {_mib(self.total_bytes)} of which {_mib(free)} is free. The framework holds "
            f"{_mib(self.framework_bytes)}. Of the allocated memory {_mib(memory.used.current)} is allocated "
            f"by PyTorch, and {_mib(memory.reserved_unused)} is reserved by PyTorch but unallocated. The "
            f"largest request that would succeed is {_mib(memory.largest_bytes or 0)}. If reserved but "
            "unallocated memory is large try expandable segments to avoid fragmentation."
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.2f} KiB"
