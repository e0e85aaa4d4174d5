"""Between processes of one host: payloads in a ring of shared memory, headers over a unix socket.

    sender                                    receiver
      copy into ring ─► header on socket ─►     header, copy out of ring, move `consumed` on
                        (a new ring's file descriptor goes with the header)

Every directed pair has a socket of its own, which the sender connects: that needs nobody at the other end, so
no order of sends and receives can deadlock. Nothing here waits but `take`; headers for which a socket has no
room are kept and go out with the next call.
"""

import os
import secrets
import select
import socket
import struct
import sys
import time
from array import array
from collections import deque

import torch

from evener.runtime.channels import ring
from evener.runtime.channels.local import SENT, Sent
from evener.runtime.channels.messages import (
    MAX_HEADER_BYTES,
    Message,
    layout_of,
    pack,
    put,
    take,
    unpack,
    unreadable,
)
from evener.runtime.channels.places import Place
from evener.runtime.channels.problems import lost, stalled
from evener.runtime.channels.stop import Stop

_PREFIX = struct.Struct("<QQQ")  # bytes of the new ring or 0, start, end
_MAX_PACKET = _PREFIX.size + MAX_HEADER_BYTES
_ONE_FILE = socket.CMSG_LEN(array("i").itemsize) if hasattr(socket, "CMSG_LEN") else 0
_SEND_BUFFER_BYTES = 2**22  # some thousand headers; the kernel gives less where its limit is lower
_CREDENTIALS = struct.Struct("3i")  # process, user, group

IS_AVAILABLE = sys.platform == "linux" and hasattr(os, "memfd_create")


class SharedTransport:
    """One device's door for the other processes of its host: a unix socket with a random, unlisted name.

    Only processes of the same user get in.
    """

    def __init__(self, here: str, timeout_s: float, look_s: float, stop: Stop) -> None:
        self.here, self.timeout_s, self.look_s, self.stop = here, timeout_s, look_s, stop
        self.address = f"evener-{secrets.token_hex(16)}"
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind(f"\0{self.address}")
        self._door.listen(1024)
        self._door.setblocking(False)
        self._senders: dict[str, SharedSender] = {}
        self._with_backlog: set[SharedSender] = set()
        self._receivers: list[SharedReceiver] = []
        self._arrived: dict[str, socket.socket] = {}

    def sender(self, to: Place) -> "SharedSender":
        if to.device not in self._senders:
            self._senders[to.device] = SharedSender(self, to)
        return self._senders[to.device]

    def receiver(self, source: Place) -> "SharedReceiver":
        self._receivers.append(SharedReceiver(self, source))
        return self._receivers[-1]

    def socket_from(self, source: str) -> socket.socket | None:
        """The connection that `source` has made, if it has."""
        while source not in self._arrived:
            try:
                connection, _ = self._door.accept()
            except BlockingIOError:
                return None
            connection.settimeout(self.timeout_s)
            try:
                name = connection.recv(1024).decode() if _is_same_user(connection) else ""
            except (OSError, ValueError):
                name = ""
            connection.setblocking(False)
            if name and name not in self._arrived:
                self._arrived[name] = connection
            else:
                connection.close()
        return self._arrived[source]

    def pause(self, awaited: socket.socket | None, source: Place, until_s: float) -> bool:
        """Wait until `awaited` (or, without it, the door) has something; False when `source` hung up.

        TimeoutError at `until_s`. Kept headers go out meanwhile.
        """
        poll = select.poll()
        poll.register(self.stop, select.POLLIN)
        poll.register(awaited or self._door, select.POLLIN)
        own = None
        if awaited is None:  # a peer that ends before it connects shows on our connection to it
            own = self.sender(source).fileno()
            poll.register(own, 0)
        for sender in self._with_backlog:
            if sender.fileno() != own:
                poll.register(sender.fileno(), select.POLLOUT)
        left_s = until_s - time.monotonic()
        events = poll.poll(max(0.0, left_s) * 1000)
        if not events:
            raise TimeoutError
        self.stop.check()
        self.flush()
        return all(number != own for number, _ in events)

    def note(self, sender: "SharedSender", has_backlog: bool) -> None:
        """Whether `sender` keeps headers that its socket has no room for."""
        (self._with_backlog.add if has_backlog else self._with_backlog.discard)(sender)

    def flush(self) -> None:
        """Send kept headers as far as the sockets have room."""
        if self._with_backlog:
            for sender in tuple(self._with_backlog):
                sender.flush()

    def drain(self) -> None:
        """Send all kept headers, before waiting for something that this transport cannot watch."""
        for sender in tuple(self._with_backlog):
            sender.drain()

    def close(self) -> None:
        self.close_sockets()
        for receiver in self._receivers:
            receiver.close()

    def close_sockets(self) -> None:
        """Let go of all sockets; what was sent stays readable for the others."""
        for connection in (self._door, *self._arrived.values()):
            connection.close()
        for sender in self._senders.values():
            sender.close()


def _is_same_user(connection: socket.socket) -> bool:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)[1] == os.geteuid()


class SharedSender:
    """The way to one other device."""

    def __init__(self, transport: SharedTransport, to: Place) -> None:
        self._transport, self._to = transport, to.device
        self._backlog: deque[tuple[bytes, int | None]] = deque()
        self._ring: ring.Ring | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        try:
            self._socket.connect(f"\0{to.address}")
            if not _is_same_user(self._socket):
                raise ConnectionRefusedError("its socket belongs to another user")
            self._socket.send(transport.here.encode())
        except OSError as e:
            self._socket.close()
            raise lost(to.device, "a connection to it was made", e) from e
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, tensors: tuple[torch.Tensor, ...], key: str) -> "Sent | Kept":
        layout = layout_of(tensors)
        header = pack(key, time.monotonic(), layout)
        found = self._ring.reserve(layout.num_bytes) if self._ring else None
        file, capacity = None, 0
        if found is None:
            size = ring.grown(self._ring.capacity, layout.num_bytes) if self._ring else 0
            capacity = max(size, ring.grown(ring.FIRST_RING_BYTES // 2, layout.num_bytes))
            self._ring, file = ring.make(capacity)
            found = self._ring.reserve(layout.num_bytes)
        assert self._ring is not None and found is not None, "a new ring has room for two such messages"
        start, end = found
        put(tensors, self._ring.views(start, layout))
        packet = _PREFIX.pack(capacity, start, end) + header
        if file is None and not self._backlog and self._sent(packet):
            self._transport.flush()
            return SENT
        self._backlog.append((packet, file))
        self._transport.note(self, True)
        self._transport.flush()
        return Kept(self) if self._backlog else SENT

    def _sent(self, packet: bytes, file: int | None = None) -> bool:
        """Whether the socket had room for `packet`; `file` goes with it."""
        try:
            if file is None:
                self._socket.send(packet)
            else:
                socket.send_fds(self._socket, [packet], [file])
        except BlockingIOError:
            return False
        except OSError as e:
            raise lost(self._to, "something was sent to it", e) from e
        return True

    def flush(self) -> bool:
        """Send what is kept as far as there is room; True when nothing is left."""
        while self._backlog:
            packet, file = self._backlog[0]
            if not self._sent(packet, file):
                return False
            self._backlog.popleft()
            if file is not None:
                os.close(file)
        self._transport.note(self, False)
        return True

    def drain(self) -> None:
        """Send all that is kept; PeerLostError when the other takes nothing for the timeout."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        poll.register(self._transport.stop, select.POLLIN)
        while not self.flush():
            self._transport.stop.check()
            if not poll.poll(self._transport.timeout_s * 1000):
                waiting = f"{len(self._backlog)} messages"
                raise stalled(self._to, waiting, self._transport.timeout_s, verb="take")

    def close(self) -> None:
        self._socket.close()
        for _, file in self._backlog:
            if file is not None:
                os.close(file)
        self._backlog.clear()
        self._ring = None


class Kept:
    """A message whose header waits for room in the socket."""

    def __init__(self, sender: SharedSender) -> None:
        self._sender = sender

    def wait(self) -> None:
        self._sender.drain()


def _files_in(beside: list[tuple[int, int, bytes]]) -> list[int]:
    """The file descriptors that came with a packet."""
    found = array("i")
    for level, kind, data in beside:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


class SharedReceiver:
    """The way from one other device."""

    def __init__(self, transport: SharedTransport, source: Place) -> None:
        self._transport, self._source = transport, source
        self._socket: socket.socket | None = None
        self._ring: ring.Ring | None = None
        self._packet_memory = memoryview(bytearray(_MAX_PACKET))

    def take(self, key: str, device: torch.device) -> Message:
        self._transport.flush()
        packet, files = self._packet(key)
        name = self._source.device
        try:
            capacity, start, end = _PREFIX.unpack_from(packet)
            if capacity:
                (file,) = files
                self._ring = ring.Ring(file, capacity)
        except (struct.error, ValueError) as e:
            raise unreadable(name, str(e)) from e
        finally:
            for file in files:
                os.close(file)
        header = unpack(packet[_PREFIX.size :], name)
        if self._ring is None:
            raise unreadable(name, "it came before the ring")
        try:
            views = self._ring.views(start, header.layout)
        except ValueError as e:
            raise unreadable(name, str(e)) from e
        tensors = take(header.layout, views, device)
        self._ring.release(end)
        return Message(header.key, header.moment_s, tensors)

    def _packet(self, key: str) -> tuple[bytes, list[int]]:
        name, timeout_s = self._source.device, self._transport.timeout_s
        until_s = 0.0
        looks_until_s = time.monotonic() + self._transport.look_s
        is_there = True
        while True:
            self._socket = self._socket or self._transport.socket_from(name)
            if self._socket is not None:
                try:
                    # As socket.recv_fds does, but for its 16 KiB of new memory a call.
                    size, beside, _, _ = self._socket.recvmsg_into([self._packet_memory], _ONE_FILE)
                    if size:
                        return bytes(self._packet_memory[:size]), _files_in(beside)
                    raise ConnectionResetError("its socket was closed")
                except BlockingIOError:
                    is_there = True
                    if time.monotonic() < looks_until_s:
                        continue
                except OSError as e:
                    raise lost(name, f"{key} was awaited from it", e) from e
            if not is_there:
                raise lost(name, f"{key} was awaited from it", "its socket was closed")
            until_s = until_s or time.monotonic() + timeout_s
            try:
                is_there = self._transport.pause(self._socket, self._source, until_s)
            except TimeoutError:
                raise stalled(name, key, timeout_s) from None

    def close(self) -> None:
        self._ring = None
