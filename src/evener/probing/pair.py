"""Two processes of one host that pass messages to each other over loopback, on command.

probe ──"send 4096 20"──► process 0 ══ gloo ══ process 1      `python -m evener.probing.pair FOLDER`
      ◄──"0.000031"──────

Process 1 is forked right after the imports, before any thread or group exists, so that torch is imported
once. Both end when the commands end, and when the other one is lost.
"""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=20)


def serve(rank: int, commands, answer: Callable[[str], None], folder: str) -> None:
    """Obey lines "send|reduce BYTES CALLS" until there are no more; answer the fastest call's seconds."""
    torch.set_num_threads(1)
    gloo: Any = dist.ProcessGroupGloo  # the stubs lack most of it
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = TIMEOUT
    group = gloo(dist.FileStore(os.path.join(folder, "store"), 2), rank, 2, options)
    answer("ready")
    for line in commands:
        what, num_bytes, calls = line.split()
        buffer = torch.zeros(max(1, int(num_bytes) // 4))
        once = _reduce if what == "reduce" else _there_and_back
        once(group, rank, buffer)
        best = float("inf")
        for _ in range(int(calls)):
            before = time.perf_counter()
            once(group, rank, buffer)
            best = min(best, time.perf_counter() - before)
        answer(repr(best if what == "reduce" else best / 2))


def _reduce(group: Any, rank: int, buffer: torch.Tensor) -> None:
    group.allreduce([buffer]).wait()


def _there_and_back(group: Any, rank: int, buffer: torch.Tensor) -> None:
    first, then = (group.send, group.recv) if rank == 0 else (group.recv, group.send)
    first([buffer], 1 - rank, 0).wait()
    then([buffer], 1 - rank, 0).wait()


def main(folder: str) -> None:
    """Fork the other process and serve as process 0 for the commands on standard input."""
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.close(write_end)
        try:
            serve(1, os.fdopen(read_end), lambda text: None, folder)
        finally:
            os._exit(0)
    os.close(read_end)
    forward = os.fdopen(write_end, "w")
    try:
        serve(0, _passed_on(sys.stdin, forward), lambda text: print(text, flush=True), folder)
    finally:
        forward.close()  # which ends the other one's commands
        os.wait()


def _passed_on(lines, forward):
    for line in lines:
        forward.write(line)
        forward.flush()
        yield line


if __name__ == "__main__":
    main(sys.argv[1])
