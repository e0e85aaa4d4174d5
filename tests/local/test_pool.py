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


def one_dies(rank: int, world_size: int) -> int:
    if rank == 0:
        os._exit(7)
    return rank


def one_hangs(rank: int, world_size: int) -> int:
    if rank == 0:
        time.sleep(60)
    return rank


def failing(rank: int, world_size: int) -> None:
    raise ValueError(f"scripted on {rank}")


def test_results_come_by_rank(pool: Pool) -> None:
    assert pool.run(summed, 3, 10.0) == [30.0, 30.0, 30.0]


def test_a_dead_process_is_told_with_its_exit_code(pool: Pool) -> None:
    dead, fine = pool.outcomes(one_dies, 2)
    assert dead.error == "died with exit code 7"
    assert fine.ok and fine.value == 1


def test_a_hanging_process_is_told_and_none_is_left(pool: Pool) -> None:
    hanging, _ = pool.outcomes(one_hangs, 2, timeout_s=1.0)
    assert hanging.error == "did not finish in time"
    assert multiprocessing.active_children() == []


def test_errors_of_all_processes_fail_the_test(pool: Pool) -> None:
    with pytest.raises(AssertionError, match=r"(?s)scripted on 0.*rank 1.*scripted on 1"):
        pool.run(failing, 2)
