"""The pool itself: it tells how a process ended, and leaves none behind."""

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.local.pool import Pool


def summed(rank: int, world_size: int, factor: float) -> float:
    x = torch.tensor(factor * rank)
    dist.all_reduce(x)
    return x.item()


def unequal(rank: int, world_size: int) -> int:
    if rank == 0:
        os._exit(7)
    if rank == 1:
        time.sleep(60)
    return rank


def failing(rank: int, world_size: int) -> None:
    raise ValueError(f"scripted on {rank}")


def test_results_come_by_rank(pool: Pool) -> None:
    assert pool.run(summed, 3, 10.0) == [30.0, 30.0, 30.0]


def test_a_dead_and_a_hanging_process_are_told_apart_and_none_is_left(pool: Pool) -> None:
    dead, hanging, fine = pool.outcomes(unequal, 3, timeout_s=1.0)
    assert dead.error == "died with exit code 7"
    assert hanging.error == "did not finish in time"
    assert fine.ok and fine.value == 2
    assert multiprocessing.active_children() == []


def test_errors_of_all_processes_fail_the_test(pool: Pool) -> None:
    with pytest.raises(AssertionError, match=r"(?s)scripted on 0.*rank 1.*scripted on 1"):
        pool.run(failing, 2)
