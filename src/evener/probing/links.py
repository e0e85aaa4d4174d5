"""Links of this host: messages between processes, and copies between its memory and an accelerator."""

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from evener.errors import EnvironmentBrokenError
from evener.probing.rounds import Clock, Task, fastest

MESSAGE_BYTES = (64, 4096, 2**16, 2**20, 2**22, 2**24)
COPY_BYTES = (4, 4096, 2**16, 2**20, 2**22, 2**24, 2**26)
START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0
LEAST_CALLS, MOST_CALLS = 3, 12
SLOT_BYTES = 2**25
"""A slot moves about this many bytes, so that large messages take few calls and small ones many."""


class Pair:
    """Two processes on this host that time messages between them; a context manager."""

    def __init__(
        self,
        command: tuple[str, ...] = (sys.executable, "-m", "evener.probing.pair"),
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self._start_timeout_s, self._answer_timeout_s = start_timeout_s, answer_timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="evener-pair-")
        self._process = subprocess.Popen(
            (*command, self._folder.name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # one signal then reaches both processes
        )
        self._rest = b""

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None:
            self._process.stdin.close()  # type: ignore[union-attr]
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT_S)
        self._kill()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        """The id of the first process, and of the process group of both."""
        return self._process.pid

    def _kill(self) -> str:
        """See to it that both processes have ended; what they wrote on standard error."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        errors = self._process.stderr
        written = b"" if errors is None or errors.closed else errors.read()
        for pipe in (self._process.stdin, self._process.stdout, errors):
            with suppress(BrokenPipeError):  # a command that nobody will read
                pipe.close()  # type: ignore[union-attr]
        return written.decode(errors="replace")

    def wait_until_ready(self) -> None:
        """Return when both processes have found each other; EnvironmentBrokenError when they do not."""
        self._line(self._start_timeout_s)

    def seconds(self, what: str, num_bytes: int) -> float:
        """Seconds of one message one way ("send") or of one all-reduce over both ("reduce")."""
        calls = min(MOST_CALLS, max(LEAST_CALLS, SLOT_BYTES // num_bytes))
        try:
            self._process.stdin.write(f"{what} {num_bytes} {calls}\n".encode())  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
        except BrokenPipeError:
            raise self._broken("ended") from None
        return float(self._line(self._answer_timeout_s))

    def _line(self, timeout_s: float) -> str:
        stdout = self._process.stdout.fileno()  # type: ignore[union-attr]
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stdout], [], [], left)[0]:
                raise self._broken(f"did not answer within {timeout_s:g} s")
            read = os.read(stdout, 4096)
            if not read:
                raise self._broken("ended")
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def _broken(self, how: str) -> EnvironmentBrokenError:
        said = self._kill().strip().splitlines()
        return EnvironmentBrokenError(
            f"the two processes that measure messages on this host {how}",
            numbers=said[-1] if said else "they wrote no error",
            remedy="free memory and ports on 127.0.0.1 for Gloo, or probe without links (--no-links)",
        )


def message_tasks(pair: Pair, what: str) -> dict[int, Task]:
    """One task for each message size; `what` is "send" or "reduce"."""

    def sample(num_bytes: int) -> Callable[[], float]:
        return lambda: pair.seconds(what, num_bytes)

    return {b: Task(name=f"{what} {_in_words(b)}", sample=sample(b)) for b in MESSAGE_BYTES}


def copy_tasks(device: torch.device, name: str, *, clock: Clock, slot_s: float) -> dict[int, Task]:
    """One task for each size of a copy between host memory and `device`: the slower direction counts."""

    def sample(num_bytes: int) -> Callable[[], float]:
        pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        there = torch.empty(num_bytes, dtype=torch.uint8, device=device)

        def copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
            def call() -> None:
                target.copy_(source, non_blocking=True)
                torch.accelerator.synchronize(device)

            return call

        both = copy(there, pinned), copy(pinned, there)
        return lambda: max(fastest(call, clock=clock, slot_s=slot_s) for call in both)

    return {b: Task(name=f"copy {_in_words(b)} {name}", sample=sample(b)) for b in COPY_BYTES}


def _in_words(num_bytes: int) -> str:
    for size, unit in ((2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= size:
            return f"{num_bytes // size} {unit}"
    return f"{num_bytes} B"
