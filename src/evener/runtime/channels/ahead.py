"""Large messages of one sender, read before they are asked for: they travel while the device computes."""

import select
import socket
import threading
from collections import deque

from evener.runtime.channels.frames import Frame, Frames
from evener.runtime.channels.porter import Porter
from evener.runtime.channels.problems import lost, stalled
from evener.runtime.channels.stop import Stop

MAX_AHEAD_BYTES = 2**31


class Ahead:
    """Takes over `connection` and its `frames`: from now on the porter reads, and `next` waits for it."""

    events = select.POLLIN

    def __init__(self, source: str, connection: socket.socket, frames: Frames, porter: Porter) -> None:
        self._source, self._connection, self._frames, self._porter = source, connection, frames, porter
        self._changed = threading.Condition()
        self._ready: deque[Frame] = deque()
        self._ready_bytes = 0
        self._paused = False
        self._error: Exception | None = None
        porter.carry(self)

    def fileno(self) -> int:
        return self._connection.fileno()

    def next(self, key: str, timeout_s: float, stop: Stop) -> Frame:
        """The next message; `stop` or a source that sends nothing for `timeout_s` ends the wait."""
        with self._changed:
            while not self._ready:
                stop.check()
                if isinstance(self._error, OSError):
                    raise lost(self._source, f"{key} was awaited from it", self._error) from self._error
                if self._error is not None:
                    raise self._error
                if not self._changed.wait(timeout_s):
                    raise stalled(self._source, key, timeout_s)
            frame = self._ready.popleft()
            self._ready_bytes -= frame.num_bytes
            goes_on, self._paused = self._paused, False
        if goes_on:
            self._porter.carry(self)
        return frame

    def move(self) -> bool:
        """Read what is there; by the porter."""
        error: Exception | None = None
        frame = None
        try:
            frame = self._frames.read(self._connection)
        except Exception as e:  # no memory for it, say: the porter goes on, and who waits is told
            error = e
        with self._changed:
            self._error = error
            if frame is not None:
                self._ready.append(frame)
                self._ready_bytes += frame.num_bytes
            self._paused = self._ready_bytes > MAX_AHEAD_BYTES
            self._changed.notify_all()  # also for a part of a message: the source does something
            return error is None and not self._paused

    def interrupt(self) -> None:
        with self._changed:
            self._changed.notify_all()
