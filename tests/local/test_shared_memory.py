"""Memory that processes of one host have in common, and how they find that they have none."""

import os

import pytest
import torch
import torch.distributed as dist

from evener.core.exchange import PIECE_BYTES
from evener.runtime.wires import shared
from evener.runtime.wires.shared import share_memory
from tests.local.pool import Pool

MEMBERS = ("a/0", "a/1")


def read_the_others(rank: int, world_size: int) -> float:
    memory = share_memory(dist.group.WORLD, MEMBERS, rooms=2)
    assert memory is not None
    whole = torch.full((PIECE_BYTES // 8,), 1.5 + rank, dtype=torch.float64)
    memory.room(MEMBERS[rank], 1, whole).copy_(whole)
    dist.barrier()
    found = memory.room(MEMBERS[1 - rank], 1, whole)
    assert torch.equal(found, torch.full_like(whole, 2.5 - rank))
    dist.barrier()
    return float(found[-1])


def test_what_one_writes_the_other_reads(pool: Pool) -> None:
    assert pool.run(read_the_others, 2) == [2.5, 1.5]


def has_none(rank: int, world_size: int, why: str) -> bool:
    files = len(os.listdir("/proc/self/fd"))
    if rank == 1 and why == "another system":
        shared.IS_AVAILABLE = False
    if rank == 1 and why == "another container":
        os.getpid = os.getppid  # a process that is another one where the others look
    memory = share_memory(dist.group.WORLD, MEMBERS, rooms=2)
    assert len(os.listdir("/proc/self/fd")) == files, "no file is left open"
    return memory is None


@pytest.mark.parametrize("why", ["another system", "another container"])
def test_who_shares_none_learns_it_on_all(pool: Pool, why: str) -> None:
    assert pool.run(has_none, 2, why) == [True, True]
