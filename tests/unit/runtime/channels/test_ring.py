"""The ring in shared memory: ranges never overlap what has not been taken, whatever comes and goes."""

import fcntl
import os
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import UsageError
from evener.runtime.channels.messages import layout_of
from evener.runtime.channels.ring import Ring, grown, make

CAPACITY = 4096


def test_one_end_writes_what_the_other_reads() -> None:
    mine, file = make(CAPACITY)
    theirs = Ring(file, CAPACITY)
    os.close(file)
    found = mine.reserve(100)
    assert found == (0, 128)
    mine.bytes[0:100] = 7
    assert theirs.bytes[99] == 7 and theirs.bytes[100] == 0
    assert mine.reserve(CAPACITY) is None
    theirs.release(128)
    assert mine.reserve(CAPACITY) == (0, 2 * CAPACITY)


def test_tensors_are_seen_where_they_lie_and_nowhere_else() -> None:
    ring, file = make(CAPACITY)
    os.close(file)
    flags, numbers = ring.views(128, layout_of((torch.zeros(3, dtype=torch.bool), torch.zeros(2, 2))))
    flags.fill_(True)
    numbers.fill_(1.5)
    assert ring.bytes[:128].sum() == 0 and ring.bytes[128:131].tolist() == [1, 1, 1]
    assert ring.bytes[192:208].view(torch.float32).tolist() == [1.5] * 4
    assert ring.bytes[208:].sum() == 0
    with pytest.raises(ValueError, match="outside of the ring"):
        ring.views(CAPACITY - 64, layout_of((torch.zeros(17),)))


def test_views_of_ever_new_shapes_do_not_pile_up() -> None:
    ring, file = make(CAPACITY)
    os.close(file)
    for n in range(1000):
        (seen,) = ring.views(64 * (n % 8), layout_of((torch.zeros(n, dtype=torch.bool),)))
        assert seen.shape == (n,) and seen.storage_offset() == (64 * (n % 8) if n else 0)
    assert len(ring._views) <= 256


@given(st.lists(st.one_of(st.integers(0, CAPACITY), st.none()), max_size=60))
def test_ranges_in_use_never_overlap(moves: list[int | None]) -> None:
    """A number sends so many bytes, None takes the oldest message."""
    ring, file = make(CAPACITY)
    os.close(file)
    in_use: deque[tuple[int, int, int]] = deque()
    for size in moves:
        if size is None:
            if in_use:
                ring.release(in_use.popleft()[2])
            continue
        found = ring.reserve(size)
        if found is None:
            room = sum(-(-(b - a) // 64) * 64 for a, b, _ in in_use) + -(-size // 64) * 64
            assert in_use and 2 * room > CAPACITY, "what is lost at the end is less than what was asked for"
            continue
        start, end = found
        assert start >= 0 and start + size <= CAPACITY
        assert all(start + size <= a or b <= start or size == 0 or a == b for a, b, _ in in_use)
        in_use.append((start, start + size, end))


def test_a_ring_that_follows_has_room_for_two() -> None:
    assert grown(2**20, 100) == 2**21
    assert grown(2**20, 3_000_000) == 2**23 >= 2 * 3_000_000


def test_a_ring_beyond_all_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="512 GiB, at most 256"):
        make(2**39)


def test_only_a_file_of_fixed_size_is_mapped() -> None:
    """Memory that shrank under the reader would end its process."""
    _, file = make(CAPACITY)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(file, 0)
    with pytest.raises(ValueError, match="in a file of"):
        Ring(file, 2 * CAPACITY)
    os.close(file)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, CAPACITY + 4096)
    with pytest.raises(ValueError, match="not fixed"):
        Ring(loose, CAPACITY)
    fcntl.fcntl(loose, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(ValueError, match="not fixed"):
        Ring(loose, CAPACITY)
    os.close(loose)
