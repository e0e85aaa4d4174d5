"""Ctrl-C and SIGTERM while a command runs: an end at once, without a traceback, by exit codes 130 and 143."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INTERRUPTED, TERMINATED = 130, 143  # as a shell counts: 128 and the signal's number


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
