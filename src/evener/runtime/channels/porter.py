"""A thread that moves bytes while the device computes; started when there is first something to carry.

sender     what the socket had no room for goes out when it has
receiver   large messages are read before they are asked for
"""

import select
import socket
import threading
from contextlib import suppress
from typing import Protocol

from evener.runtime.channels.stop import Stop


class Load(Protocol):
    """Something to carry."""

    events: int  # what to wait for: select.POLLIN or select.POLLOUT

    def fileno(self) -> int: ...

    def move(self) -> bool:
        """Move what can be moved now, without waiting; False when there is nothing more to do."""
        ...

    def interrupt(self) -> None:
        """Wake whoever waits for this: it is over."""
        ...


class Porter:
    """Carries loads until it is over. `stop` ends it."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._lock = threading.Lock()
        self._loads: set[Load] = set()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._thread: threading.Thread | None = None

    def carry(self, load: Load) -> None:
        """Move `load` until it says that there is nothing more to do; may be called again at any time."""
        with self._lock:
            self._loads.add(load)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="evener-porter", daemon=True)
                self._thread.start()
        with suppress(BlockingIOError):  # full: it has enough reasons to wake up
            self._wake_writer.send(b"!")

    def join(self) -> None:
        """Wait until the thread has seen that it is over."""
        if self._thread is not None:
            self._thread.join()
        self._wake_reader.close()
        self._wake_writer.close()

    def _run(self) -> None:
        while not self._stop.is_set:
            poll = select.poll()
            poll.register(self._stop, select.POLLIN)
            poll.register(self._wake_reader, select.POLLIN)
            with self._lock:
                loads = {load.fileno(): load for load in self._loads}
            for number, load in loads.items():
                poll.register(number, load.events)
            for number, _ in poll.poll():
                if number == self._wake_reader.fileno():
                    self._wake_reader.recv(4096)
                elif number in loads:
                    self._move(loads[number])
        for load in tuple(self._loads):
            load.interrupt()

    def _move(self, load: Load) -> None:
        with self._lock:  # so that a load which says `carry` again meanwhile is not lost
            self._loads.discard(load)
        if load.move():
            with self._lock:
                self._loads.add(load)
