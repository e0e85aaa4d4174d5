"""Memory of a device as a caching allocator hands it out: blocks cut from segments, kept when freed.

    segment   ▓▓▓▓▓▓▓▓ 2 MiB for blocks up to 1 MiB, 20 MiB up to 10 MiB, else the size in steps of 2 MiB
    blocks    ██ ██░░█    used (█), free (░): free neighbours join, the best fit is cut

Sizes and rules are those of torch's CUDA allocator, so that reserved, used and lost bytes behave alike.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import count

from evener.core.figures import Value

MIB = 2**20


class Sizes(Value, frozen=True, kw_only=True):
    """Block and segment sizes in bytes; the defaults are those of torch's CUDA allocator (2.13)."""

    block: int = 512
    small: int = MIB
    small_segment: int = 2 * MIB
    large: int = 10 * MIB
    large_segment: int = 20 * MIB
    step: int = 2 * MIB

    def smaller(self, times: float) -> "Sizes":
        """All sizes divided, in steps of 64 bytes: for devices whose memory is divided as well.

        Example: 1,024 times smaller, blocks come in 64 bytes and the small segment has 2 KiB.
        """
        names = self.__struct_fields__
        return Sizes(**{n: max(64, round(getattr(self, n) / times / 64) * 64) for n in names})


class OutOfRoom(Exception):
    """No segment can be had any more; `asked` bytes were wanted."""

    def __init__(self, asked: int) -> None:
        super().__init__(asked)
        self.asked = asked


class Block:
    """Part of a segment; free ones wait in a pool."""

    __slots__ = ("before", "behind", "is_small", "key", "number", "requested", "size", "used")

    def __init__(self, size: int, *, is_small: bool, number: int) -> None:
        self.size, self.is_small, self.number = size, is_small, number
        self.requested = 0
        self.used = False
        self.before: Block | None = None
        self.behind: Block | None = None
        self.key: tuple[int, int] = (size, number)


@dataclass
class Counted:
    """Bytes now, at most since the last reset, and summed up over all time."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def add(self, num_bytes: int) -> None:
        self.current += num_bytes
        if num_bytes > 0:
            self.allocated += num_bytes
            if self.current > self.peak:
                self.peak = self.current
        else:
            self.freed -= num_bytes


class Memory:
    """A device's memory of `cap_bytes` (None: no end). Not safe from several threads without a lock.

    With `expandable` segments a pool is one segment that grows in steps, as torch's expandable_segments do:
    a request that does not fit takes up the free end before it asks for more.
    """

    def __init__(
        self, cap_bytes: int | None = None, sizes: Sizes | None = None, *, expandable: bool = False
    ) -> None:
        self.cap_bytes = cap_bytes
        self.sizes = sizes or Sizes()
        self.expandable = expandable
        self.used, self.requested, self.reserved = Counted(), Counted(), Counted()
        self.num_retries = self.num_failures = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._ends: dict[bool, Block] = {}
        self._numbers = count()

    @property
    def reserved_unused(self) -> int:
        """Bytes that are taken from the device and hold nothing."""
        return self.reserved.current - self.used.current

    def take(self, num_bytes: int) -> Block:
        """A block for `num_bytes`; OutOfRoom when neither a free block nor a new segment can be had.

        Example: 1,000 bytes take 1,024 of a segment of 2 MiB.
        """
        size = max(1, -(-num_bytes // self.sizes.block)) * self.sizes.block
        is_small = size <= self.sizes.small
        block = self._fitting(size, is_small)
        if block is None:
            block = self._grown(size, is_small)
        if block is None and self._give_back_segments():
            self.num_retries += 1
            block = self._grown(size, is_small)
        if block is None:
            self.num_failures += 1
            raise OutOfRoom(num_bytes)
        least = self.sizes.block if is_small or self.expandable else self.sizes.small + 1
        if block.size - size >= least:
            self._cut(block, size)
        block.used, block.requested = True, num_bytes
        self.used.add(block.size)
        self.requested.add(num_bytes)
        return block

    def free(self, block: Block) -> None:
        """Give `block` back to its pool, joined with free neighbours."""
        self.used.add(-block.size)
        self.requested.add(-block.requested)
        block.used = False
        for other in (block.before, block.behind):
            if other is not None and not other.used:
                self._drop(other)
                self._join(block, other)
        self._keep(block)

    def empty_cache(self) -> int:
        """Give segments without a used block back to the device; the bytes that came back."""
        return self._give_back_segments()

    def reset_peaks(self) -> None:
        """Peaks begin again at what is held now."""
        for counted in (self.used, self.requested, self.reserved):
            counted.peak = counted.current

    @property
    def largest_bytes(self) -> int | None:
        """The largest request that would succeed now, segments given back first; None without a cap."""
        if self.cap_bytes is None:
            return None
        whole = sum(b.size for b in self._whole_segments())
        room = self.cap_bytes - self.reserved.current + whole
        return max([room, *(pool[-1][0] for pool in self._free.values() if pool)])

    def _fitting(self, size: int, is_small: bool) -> Block | None:
        pool = self._free[is_small]
        at = bisect_left(pool, (size, -1))
        return pool.pop(at)[2] if at < len(pool) else None

    def _grown(self, size: int, is_small: bool) -> Block | None:
        """A free block of at least `size` in a new segment, or at the end of one that grows."""
        end = self._ends.get(is_small) if self.expandable else None
        have = end.size if end is not None and not end.used else 0
        more = self._segment_bytes(size - have, is_small)
        if self.cap_bytes is not None and self.reserved.current + more > self.cap_bytes:
            return None
        self.reserved.add(more)
        if have:
            assert end is not None
            self._drop(end)
            end.size += more
            end.key = (end.size, end.number)
            return end
        block = Block(more, is_small=is_small, number=next(self._numbers))
        if self.expandable:
            if end is not None:
                block.before, end.behind = end, block
            self._ends[is_small] = block
        return block

    def _segment_bytes(self, size: int, is_small: bool) -> int:
        s = self.sizes
        if self.expandable:
            step = s.small_segment if is_small else s.step
            return -(-size // step) * step
        if is_small:
            return s.small_segment
        return s.large_segment if size < s.large else -(-size // s.step) * s.step

    def _cut(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, is_small=block.is_small, number=next(self._numbers))
        rest.before, rest.behind = block, block.behind
        if block.behind is not None:
            block.behind.before = rest
        elif self._ends.get(block.is_small) is block:
            self._ends[block.is_small] = rest
        block.behind, block.size = rest, size
        self._keep(rest)

    def _join(self, block: Block, other: Block) -> None:
        """`other`, a neighbour, becomes part of `block`."""
        block.size += other.size
        if block.before is other:
            block.before = other.before
            if other.before is not None:
                other.before.behind = block
        else:
            block.behind = other.behind
            if other.behind is not None:
                other.behind.before = block
            elif self._ends.get(block.is_small) is other:
                self._ends[block.is_small] = block

    def _keep(self, block: Block) -> None:
        block.key = (block.size, block.number)
        insort(self._free[block.is_small], (*block.key, block))

    def _drop(self, block: Block) -> None:
        pool = self._free[block.is_small]
        del pool[bisect_left(pool, block.key)]

    def _whole_segments(self) -> list[Block]:
        """Free blocks that can go back to the device; of expandable segments every free end."""
        found = [b for pool in self._free.values() for *_, b in pool]
        return [b for b in found if b.behind is None and (b.before is None or self.expandable)]

    def _give_back_segments(self) -> int:
        whole = self._whole_segments()
        for block in whole:
            self._drop(block)
            self.reserved.add(-block.size)
            if self.expandable:
                if block.before is not None:
                    block.before.behind = None
                    self._ends[block.is_small] = block.before
                else:
                    self._ends.pop(block.is_small, None)
        return sum(b.size for b in whole)
