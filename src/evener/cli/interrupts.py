"""Ctrl-C, SIGTERM and a closed pipe while a command runs: an end at once, without a traceback.

By exit codes 130, 143 and 141, as a shell counts: 128 and the signal's number.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INTERRUPTED, UNREAD, TERMINATED = 130, 141, 143
_OUT, _ERR = 1, 2  # standard output and error, whatever Python has put in their places


@contextmanager
def orderly_interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt as ever; in the middle of an import it ends the process.

    Packages swallow what is raised while they are imported, or are broken by it. Only in the main thread, and
    where Ctrl-C is not ignored.
    """
    with _handling(signal.SIGINT, _interrupt, signal.default_int_handler):
        yield


@contextmanager
def orderly_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit in here, so that what was begun is brought to its end; see above."""
    with _handling(signal.SIGTERM, lambda *_: sys.exit(TERMINATED), signal.SIG_DFL):
        yield


def is_unread(number: int | None = None) -> bool:
    """Whether standard output or error (or one of them) is a pipe that nobody reads any more.

    SIGPIPE, which ends most commands then, stays off: it would also end a job whose peer is lost.
    """
    watched = select.poll()
    for stream in (_OUT, _ERR) if number is None else (number,):
        watched.register(stream, 0)
    return any(event & select.POLLERR for _, event in watched.poll(0))


def leave_unread() -> int:
    """Let go of what nobody reads, so that nothing more is said of it; returns the exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (_OUT, _ERR):
        if is_unread(stream):
            os.dup2(nowhere, stream)
    return UNREAD


@contextmanager
def _handling(number: signal.Signals, handler: Any, instead_of: Any) -> Iterator[None]:
    """`handler` in the place of the usual one, and nothing where somebody has another."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(number) != instead_of:
        yield
        return
    signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, instead_of)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _imports(frame):
        server = sys.modules.get("evener.session.launching.server")
        if server:
            server.end_server()
        os._exit(INTERRUPTED)  # nothing else was begun that would have to be ended
    signal.default_int_handler(number, frame)


def _imports(frame: FrameType | None) -> bool:
    """Whether an import is under way where the signal came."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
