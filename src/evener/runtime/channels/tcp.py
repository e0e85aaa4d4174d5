"""Between hosts: a stream of messages over a TCP connection for each directed pair.

    sender                                          receiver
      connects, shows tokens ────────────────►        its door lets in who knows its token
      message message message ═══════════════►        read into new memory

The sender connects, which needs nobody at the other end at once, and writes what the socket has room for. So
no order of sends and receives can deadlock: nothing here waits but `take`. Only what is larger than the
buffers of a socket needs a thread beside the device's own (`porter`).
"""

import select
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress

import torch

from evener.runtime.channels.ahead import Ahead
from evener.runtime.channels.doors import Door, connect
from evener.runtime.channels.frames import Frame, Frames, beyond, framed
from evener.runtime.channels.local import SENT, Sent
from evener.runtime.channels.messages import Message, layout_of, pack
from evener.runtime.channels.places import Place
from evener.runtime.channels.porter import Porter
from evener.runtime.channels.problems import lost, stalled
from evener.runtime.channels.stop import Stop

LARGE_BYTES = 2**20  # from a larger message on, all of its sender are read before they are asked for
_ROOM_BYTES = 3 * 2**20  # what the receiver's socket keeps while its device computes


class TcpTransport:
    """One device's door for processes of other hosts, and its ways to theirs."""

    def __init__(self, token: str, door: Door, timeout_s: float, look_s: float, stop: Stop) -> None:
        self.token, self.door, self.timeout_s = token, door, timeout_s
        self.look_s, self.stop = look_s, stop
        self.porter = Porter(stop)
        self._senders: dict[str, TcpSender] = {}

    def sender(self, to: Place) -> "TcpSender":
        if to.device not in self._senders:
            self._senders[to.device] = TcpSender(self, to)
        return self._senders[to.device]

    def receiver(self, source: Place) -> "TcpReceiver":
        return TcpReceiver(self, source)

    def close(self) -> None:
        """Let go of all sockets; `stop` has been set."""
        self.porter.join()
        self.close_sockets()

    def close_sockets(self) -> None:
        """The same without waiting for the thread, which a forked child does not have."""
        self.door.close()
        for sender in self._senders.values():
            sender.close()


class TcpSender:
    """The way to one other device."""

    events = select.POLLOUT

    def __init__(self, transport: TcpTransport, to: Place) -> None:
        self._transport, self._to = transport, to.device
        try:
            self._socket = connect(to.door, to.token, transport.token, transport.timeout_s, transport.stop)
        except OSError as e:
            raise lost(to.device, "a connection to it was made", e) from e
        self._changed = threading.Condition()
        self._backlog: deque[memoryview] = deque()
        self._error: OSError | None = None
        self._num_kept = self._num_gone = 0  # messages that had to wait for room

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, tensors: tuple[torch.Tensor, ...], key: str) -> "Sent | Kept":
        layout = layout_of(tensors)
        views = framed(pack(key, 0.0, layout), tensors)  # no moment: the other host has another clock
        with self._changed:
            self._check()
            num = 0 if self._backlog else self._write(views)
            if num == sum(map(len, views)):
                return SENT
            self._backlog.append(beyond(views, num))
            self._num_kept += 1
            kept = Kept(self, self._num_kept, key)
        self._transport.porter.carry(self)
        return kept

    def _write(self, views: list[memoryview]) -> int:
        """How many bytes of `views` the socket had room for."""
        try:
            return self._socket.sendmsg(views)
        except BlockingIOError:
            return 0
        except OSError as e:
            self._error = e
            raise lost(self._to, "something was sent to it", e) from e

    def move(self) -> bool:
        """Send what is kept as far as there is room; by the porter."""
        with self._changed:
            try:
                while self._backlog and self._error is None:
                    num = self._socket.send(self._backlog[0])
                    self._backlog[0] = self._backlog[0][num:]
                    if not self._backlog[0]:
                        self._backlog.popleft()
                        self._num_gone += 1
                    self._changed.notify_all()
            except BlockingIOError:
                return True
            except OSError as e:
                self._error = e
                self._changed.notify_all()
        return False

    def interrupt(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, number: int, key: str) -> None:
        """Return when kept message `number` has left; PeerLostError when nothing moves for the timeout."""
        with self._changed:
            while self._num_gone < number:
                self._check()
                if not self._changed.wait(self._transport.timeout_s):
                    raise stalled(self._to, key, self._transport.timeout_s, verb="take")

    def close(self) -> None:
        self._socket.close()
        self._backlog.clear()

    def _check(self) -> None:
        self._transport.stop.check()
        if self._error is not None:
            raise lost(self._to, "something was sent to it", self._error) from self._error


class Kept:
    """A message of which the socket could not take all."""

    def __init__(self, sender: TcpSender, number: int, key: str) -> None:
        self._sender, self._number, self._key = sender, number, key

    def wait(self) -> None:
        self._sender.wait_for(self._number, self._key)


class TcpReceiver:
    """The way from one other device."""

    def __init__(self, transport: TcpTransport, source: Place) -> None:
        self._transport, self._source = transport, source
        self._frames = Frames(source.device)
        self._socket: socket.socket | None = None
        self._ahead: Ahead | None = None

    def take(self, key: str, device: torch.device) -> Message:
        way = self._transport
        way.stop.check()
        self._frames.pins |= device.type != "cpu"
        frame = self._ahead.next(key, way.timeout_s, way.stop) if self._ahead else self._next(key)
        if frame.num_bytes > LARGE_BYTES and not self._ahead:
            assert self._socket is not None
            self._ahead = Ahead(self._source.device, self._socket, self._frames, way.porter)
        return Message(frame.header.key, None, frame.finished(device))

    def _next(self, key: str) -> Frame:
        """The next message, read by the thread that waits for it."""
        name, timeout_s = self._source.device, self._transport.timeout_s
        looks_until_s = time.monotonic() + self._transport.look_s
        until_s, num_read = 0.0, 0
        while True:
            if self._socket is None:
                self._socket = self._transport.door.guest(self._source.token)
                if self._socket is not None:
                    _make_room(self._socket)
            if self._socket is not None:
                try:
                    frame = self._frames.read(self._socket)
                except OSError as e:
                    raise lost(name, f"{key} was awaited from it", e) from e
                if frame is not None:
                    return frame
                if time.monotonic() < looks_until_s:
                    continue
            if not until_s or self._frames.num_read > num_read:
                until_s, num_read = time.monotonic() + timeout_s, self._frames.num_read
            if not self._pause(key, until_s):
                raise stalled(name, key, timeout_s)
            self._transport.stop.check()

    def _pause(self, key: str, until_s: float) -> bool:
        """Sleep until there may be something to read; False when it is `until_s`."""
        poll = select.poll()
        poll.register(self._transport.stop, select.POLLIN)
        own = -1
        if self._socket is not None:
            poll.register(self._socket, select.POLLIN)
        else:
            self._transport.door.watch(poll)
            # A peer that ends before it connects shows on our connection to it, which brings nothing else.
            own = self._transport.sender(self._source).fileno()
            poll.register(own, select.POLLIN)
        events = poll.poll(max(0.0, until_s - time.monotonic()) * 1000)
        if any(number == own for number, _ in events) and len(events) == 1:
            raise lost(self._source.device, f"{key} was awaited from it", "its connection was closed")
        return bool(events)


def _make_room(connection: socket.socket) -> None:
    """Have the kernel keep more of what arrives; a fixed buffer would be limited, and would not grow."""
    if hasattr(socket, "SO_RCVLOWAT") and sys.platform == "linux":
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _ROOM_BYTES)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
