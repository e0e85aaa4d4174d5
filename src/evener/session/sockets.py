"""The sockets of a process group, so that a thread that waits in it can be woken from another one.

A wait inside Gloo ends only when its socket does: the group's own abort() frees nobody. Sockets are told
apart by when they were opened: those that came while a group was being formed are the group's.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil


class GroupSockets:
    """Remembers which sockets of this process were opened inside `opening()`, and can shut them all down."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: set[tuple[int, int]] = set()
        self._before: set[tuple[int, int]] | None = None

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Every TCP socket that is opened in here is the group's; no other thread may open one meanwhile."""
        with self._lock:
            self._before = _open_now()
        try:
            yield
        finally:
            with self._lock:
                self._known |= _open_now() - (self._before or set())
                self._before = None

    def shut(self) -> int:
        """End every wait on the group's sockets, also while it is being formed; how many were shut."""
        with self._lock:
            now = _open_now()
            ours = self._known & now
            if self._before is not None:
                ours |= now - self._before
            return sum(_shut(descriptor) for descriptor, _ in ours)

    def forget(self) -> None:
        """The group is gone: its sockets' numbers may belong to others now."""
        with self._lock:
            self._known.clear()


def shut_sockets(which: Callable[[Any], bool]) -> int:
    """Shut down the connected TCP sockets of this process for which `which` holds; how many."""
    found = psutil.Process().net_connections(kind="tcp")
    return sum(_shut(connection.fd) for connection in found if connection.raddr and which(connection))


def _open_now() -> set[tuple[int, int]]:
    """(descriptor, inode) of every connected TCP socket of this process: a number alone may be used again.

    Not those that listen: Gloo ends the process when one of these is shut down.
    """
    found = set()
    for connection in psutil.Process().net_connections(kind="tcp"):
        if not connection.raddr:
            continue
        try:
            found.add((connection.fd, os.fstat(connection.fd).st_ino))
        except OSError:
            continue  # closed since it was listed
    return found


def _shut(descriptor: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as ours:
            ours.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False  # not connected, or closed since
    return True
