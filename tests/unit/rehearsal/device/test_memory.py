import random

import pytest

from evener.rehearsal.device.memory import MIB, Block, Memory, OutOfRoom, Sizes


def test_a_block_is_rounded_and_cut_from_a_segment():
    memory = Memory()
    memory.take(1000)
    assert (memory.used.current, memory.requested.current, memory.reserved.current) == (1024, 1000, 2 * MIB)
    memory.take(1)
    assert memory.used.current == 1024 + 512 and memory.reserved.current == 2 * MIB


@pytest.mark.parametrize(
    ("asked", "reserved"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (9 * MIB, 20), (10 * MIB, 10), (11 * MIB + 1, 12)],
)
def test_segments_are_those_of_the_cuda_allocator(asked: int, reserved: int):
    memory = Memory()
    memory.take(asked)
    assert memory.reserved.current == reserved * MIB


def test_a_large_block_keeps_what_is_left_of_its_segment_if_that_is_small():
    memory = Memory()
    block = memory.take(19 * MIB + MIB // 2)  # 20 MiB in steps of 2: half a MiB is left, and stays with it
    assert block.size == 20 * MIB


def test_free_neighbours_join():
    memory = Memory()
    a, b, c = memory.take(512), memory.take(512), memory.take(512)
    for block in (a, c, b):
        memory.free(block)
    assert memory.used.current == 0 and memory.take(2 * 512).size == 1024
    assert memory.reserved.current == 2 * MIB


def test_peaks_are_kept_until_reset():
    memory = Memory()
    memory.free(memory.take(4096))
    assert (memory.used.current, memory.used.peak) == (0, 4096)
    memory.reset_peaks()
    assert memory.used.peak == 0 and memory.reserved.peak == 2 * MIB


def test_the_cap_counts_segments_and_cached_ones_are_given_back_first():
    memory = Memory(24 * MIB)
    large = memory.take(15 * MIB)
    with pytest.raises(OutOfRoom):
        memory.take(12 * MIB)
    assert memory.num_failures == 1
    memory.free(large)
    assert memory.reserved.current == 16 * MIB
    memory.take(20 * MIB)
    assert memory.reserved.current == 20 * MIB and memory.num_retries == 1


def test_fragmentation_is_what_is_reserved_and_cannot_be_used():
    memory = Memory(40 * MIB)
    blocks = [memory.take(5 * MIB) for _ in range(8)]
    for block in blocks[::2]:
        memory.free(block)
    assert memory.reserved_unused == 20 * MIB
    with pytest.raises(OutOfRoom):
        memory.take(6 * MIB)
    assert memory.largest_bytes == 5 * MIB


def test_an_expandable_segment_grows_by_what_is_missing():
    memory = Memory(40 * MIB, expandable=True)
    memory.free(memory.take(15 * MIB))
    memory.take(33 * MIB)
    assert memory.reserved.current == 34 * MIB


def test_empty_cache_gives_back_whole_segments_only():
    memory = Memory()
    memory.take(512)
    memory.free(memory.take(30 * MIB))
    assert memory.empty_cache() == 30 * MIB and memory.reserved.current == 2 * MIB


def test_smaller_sizes_go_with_smaller_devices():
    sizes = Sizes().smaller(1024)
    assert (sizes.block, sizes.small, sizes.small_segment, sizes.large_segment) == (64, 1024, 2048, 20 * 1024)


@pytest.mark.parametrize("expandable", [False, True])
def test_whatever_is_taken_and_freed_the_sums_agree(expandable: bool):
    rng = random.Random(3)
    memory = Memory(400 * MIB, expandable=expandable)
    held: list[Block] = []
    for _ in range(3000):
        if held and rng.random() < 0.5:
            memory.free(held.pop(rng.randrange(len(held))))
        else:
            try:
                held.append(memory.take(int(10 ** rng.uniform(0, 7.3))))
            except OutOfRoom:
                continue
        free = [size for pool in memory._free.values() for size, _, _ in pool]
        assert memory.used.current == sum(b.size for b in held)
        assert memory.reserved.current == memory.used.current + sum(free) <= 400 * MIB
    for block in held:
        memory.free(block)
    memory.empty_cache()
    assert memory.reserved.current == 0
