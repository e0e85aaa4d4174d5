"""Asking other programs, which may be missing, crash or never answer: bounded in time and in words."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

MOST_BYTES = 2**20
END_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a program wrote, and how it failed ("" where it did not)."""

    text: str = ""
    failure: str = ""


def ask(command: Sequence[str], timeout_s: float, env: dict[str, str] | None = None) -> Answer:
    """Run `command` for at most `timeout_s` seconds; what it wrote before a failure is kept, 1 MiB at most.

    A program that hangs in the kernel cannot be ended; it is left behind, and the answer says so.
    """
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
    except OSError as e:
        return Answer(failure=f"{command[0]}: {e.strerror}")
    out, err, late = _read(process, time.monotonic() + timeout_s)
    if late:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    try:
        code = process.wait(END_S)
    except subprocess.TimeoutExpired:
        return Answer(text=out, failure=f"did not answer within {timeout_s:g} s and cannot be ended")
    if late:
        return Answer(text=out, failure=f"did not answer within {timeout_s:g} s")
    if code < 0:
        return Answer(text=out, failure=f"was ended by signal {signal.Signals(-code).name}")
    if code:
        said = err.strip().splitlines() or out.strip().splitlines()
        return Answer(text=out, failure=said[-1][:500] if said else f"ended with code {code}")
    return Answer(text=out)


def _read(process: subprocess.Popen, deadline: float) -> tuple[str, str, bool]:
    """What the process writes until it closes both pipes; True where the time ran out first."""
    pipes = [process.stdout, process.stderr]
    texts = {pipe.fileno(): b"" for pipe in pipes if pipe}
    open_ends = set(texts)
    while open_ends and (left := deadline - time.monotonic()) > 0:
        for end in select.select(list(open_ends), [], [], left)[0]:
            piece = os.read(end, 65536)
            if not piece:
                open_ends.discard(end)
            texts[end] = (texts[end] + piece)[:MOST_BYTES]
    for pipe in pipes:
        if pipe:
            pipe.close()
    out, err = (text.decode(errors="replace") for text in texts.values())
    return out, err, bool(open_ends)
