"""Processes for tests that need several: forked from a server that has torch loaded, gone when the test ends.

pytest ──► fork server (torch loaded once) ──► rank 0, rank 1, … ──gloo on loopback──┐
   └─ hosts the store on a free port; collects results; lets all go at once ◄────────┘
"""

import contextlib
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from evener.session.launching import server


def start_pool_server() -> None:
    """The fork server of all tests of real processes: a job's, which has what these import loaded as well."""
    if "pytest" not in server.PRELOADED:
        server.PRELOADED.append("pytest")
    server.start_server()


@dataclass(frozen=True)
class Outcome:
    """How a process ended: with a value, or with an error's text; `error_type` is empty for one that died."""

    value: Any = None
    error_type: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error


class Pool:
    """Runs functions in several processes that share a gloo group."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 40.0) -> list[Any]:
        """`fn(rank, world_size, *args)` in each process, results by rank; an error in any fails the test."""
        outcomes = self.outcomes(fn, world_size, *args, timeout_s=timeout_s)
        texts = [f"--- rank {rank} ---\n{o.error}" for rank, o in enumerate(outcomes) if not o.ok]
        if texts:
            raise AssertionError("\n".join(texts))
        return [o.value for o in outcomes]

    def outcomes(
        self, fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 40.0
    ) -> list[Outcome]:
        """The same for tests in which processes fail: how each ended, none of them left."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes: list[BaseProcess] = []
        ours: list[Connection] = []
        try:
            for rank in range(world_size):
                mine, theirs = self._context.Pipe()
                process = self._context.Process(
                    target=_work, args=(theirs, fn, rank, world_size, store.port, args), daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                ours.append(mine)
            return _collect(ours, processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for connection in ours:
                connection.close()


def _collect(ours: list[Connection], processes: list[BaseProcess], deadline_s: float) -> list[Outcome]:
    """The outcome of every process by `deadline_s`. Nobody leaves before all have reported.

    A process that left early would look like a lost peer to those still in a sum.
    """
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(ours):
        waiting = {ours[rank]: rank for rank in range(len(ours)) if rank not in outcomes}
        ready = wait(list(waiting), timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            for rank in waiting.values():
                outcomes[rank] = Outcome(error="did not finish in time")
        for connection in ready:
            rank = waiting[connection]  # type: ignore[index]
            try:
                outcomes[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                processes[rank].join()
                outcomes[rank] = Outcome(error=f"died with exit code {processes[rank].exitcode}")
    return [outcomes[rank] for rank in range(len(ours))]


def _work(
    connection: Connection, fn: Callable[..., Any], rank: int, world_size: int, port: int, args: tuple
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=20)
        )
        outcome = Outcome(value=fn(rank, world_size, *args))
    except Exception as e:
        outcome = Outcome(error_type=type(e).__name__, error=traceback.format_exc())
    # Plain pickle: torch's own would share memory with a process that is about to end.
    connection.send_bytes(pickle.dumps(outcome))
    if outcome.ok:
        with contextlib.suppress(EOFError):
            connection.recv_bytes()  # until the test lets go (or kills)
    os._exit(0)  # sockets close at once, so that peers of a failed process learn it
