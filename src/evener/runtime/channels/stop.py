"""What ends every wait of a channel from another thread: a watchdog that lost a peer, or whoever closes."""

import socket
import threading
from collections.abc import Callable

from evener.errors import PeerLostError


class Stop:
    """Set once, with the reason. Readable from then on, so that it can stand in any poll."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._lock = threading.Lock()
        self._reason: tuple[str, str] | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def is_set(self) -> bool:
        """Whether it is over."""
        return self._reason is not None

    def set(self, what: str, remedy: str) -> bool:
        """It is over, because `what`; False, and nothing done, where it was over before."""
        with self._lock:
            if self._reason is not None:
                return False
            self._reason = what, remedy
            self._writer.send(b"!")
        for listener in self._listeners:
            listener()
        return True

    def also(self, listener: Callable[[], None]) -> None:
        """Call `listener` too when it is over: for waits that no poll can see."""
        self._listeners.append(listener)

    def check(self) -> None:
        """Raise PeerLostError with the reason once it is over."""
        if self._reason is not None:
            what, remedy = self._reason
            raise PeerLostError(what, remedy=remedy)

    def fileno(self) -> int:
        """For polls: there is something to read when it is over."""
        return self._reader.fileno()

    def close(self) -> None:
        """Let go of the sockets, when nobody waits any more."""
        with self._lock:
            self._reader.close()
            self._writer.close()
