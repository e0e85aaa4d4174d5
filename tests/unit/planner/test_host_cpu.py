"""The worked numbers of the threads that a host's CPU computes with."""

import pytest

from evener.planner.host_cpu import threads_left


@pytest.mark.parametrize(
    ("threads", "accelerators", "workers", "tables", "compute"),
    [(16, 2, 2, True, 6), (8, 1, 0, False, 7), (8, 1, 0, True, 6), (8, 4, 1, False, 1), (2, 2, 0, True, 1)],
)
def test_what_others_leave(threads: int, accelerators: int, workers: int, tables: bool, compute: int) -> None:
    found = threads_left(threads, accelerators=accelerators, loader_workers=workers, tables=tables)
    assert found.compute == compute
    assert found.why.startswith(f"computes with {compute}")


def test_the_sum_is_told() -> None:
    assert threads_left(16, accelerators=2, loader_workers=2, tables=True).why == (
        "computes with 6: 16 threads less 2 that queue for accelerators, 6 that load data, "
        "2 that look up tables"
    )
    assert threads_left(2, accelerators=2).why == (
        "computes with 1, which it shares: 2 threads less 2 that queue for accelerators leave 0"
    )
