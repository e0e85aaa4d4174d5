"""Between hosts: one byte buffer a message over Gloo's send and receive, the header in front of the payload.

    receiver   posts two buffers per peer ahead      Gloo ships nothing before a receive is posted
    sender     length, what it has taken itself, header, payload

A buffer that is too small ends the receiving process, so both ends compute from the same rule how large the
other's posted buffers are; a larger message goes in several parts, and buffers posted later have room for it.
A wait that times out has closed the pair for good.
"""

import struct
import zlib
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evener.errors import PeerLostError
from evener.runtime.channels.messages import (
    ALIGNMENT,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
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

DEPTH = 2  # 1 to 4 made no difference, 16 was slower
FIRST_BUFFER_BYTES = 2**18
_PREFIX = struct.Struct("<QQ")  # bytes of the whole message, number of parts taken from the other end
_MAX_MESSAGE_BYTES = MAX_PAYLOAD_BYTES + MAX_HEADER_BYTES + 2 * ALIGNMENT


class Capacities:
    """How large each posted buffer is: the one rule that both ends follow."""

    def __init__(self, first_bytes: int) -> None:
        self._posted = deque([first_bytes] * DEPTH)
        self._largest = first_bytes

    def use(self, message_bytes: int) -> tuple[int, int]:
        """For the next part, of a message of `message_bytes`: (room in its buffer, room in the buffer posted
        in its place).

        Example: buffers of 4096 bytes; two parts of 6000 bytes find 4096 each, and are followed by 8192.
        """
        self._largest = max(self._largest, 1 << (message_bytes - 1).bit_length())
        self._posted.append(self._largest)
        return self._posted.popleft(), self._largest


def host_bytes(num_bytes: int) -> torch.Tensor:
    """Bytes in host memory, pinned where an accelerator could use that."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.accelerator.is_available())


class GlooTransport:
    """One device's end of a torch.distributed group with a Gloo backend for the CPU."""

    def __init__(self, here: Place, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._here, self._group, self._timeout_s = here, group, timeout_s
        self._links: dict[str, GlooLink] = {}

    def sender(self, to: Place) -> "GlooLink":
        if to.device not in self._links:
            self._links[to.device] = GlooLink(self._here, to, self._group, self._timeout_s)
        return self._links[to.device]

    def receiver(self, source: Place) -> "GlooLink":
        link = self.sender(source)
        link.post()
        return link

    def close(self) -> None:
        for link in self._links.values():
            link.drop()


class GlooLink:
    """Both ways between this device and another."""

    def __init__(self, here: Place, peer: Place, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._peer, self._rank, self._group = peer.device, peer.rank, group
        self._timeout_s, self._timeout = timeout_s, timedelta(seconds=timeout_s)
        self._tag_out, self._tag_in = _tag(here, peer), _tag(peer, here)
        self._room_there = Capacities(peer.buffer_bytes)
        self._room_here = Capacities(here.buffer_bytes)
        self._first_bytes = here.buffer_bytes
        self._posted: deque[tuple[torch.Tensor, Any]] = deque()
        self._on_the_way: deque[Parcel] = deque()
        self._spare: list[torch.Tensor] = []
        self._num_sent = self._num_taken = 0

    def send(self, tensors: tuple[torch.Tensor, ...], key: str) -> "Parcel":
        layout = layout_of(tensors)
        # No moment: the other host has another clock.
        header = pack(key, 0.0, layout)
        payload_at = -(-(_PREFIX.size + len(header)) // ALIGNMENT) * ALIGNMENT
        total = payload_at + layout.num_bytes
        buffer = self._buffer(total)
        front = _PREFIX.pack(total, self._num_taken) + header
        buffer[: len(front)] = torch.frombuffer(bytearray(front), dtype=torch.uint8)
        put(tensors, layout, buffer[payload_at:total])
        parcel = Parcel(self, buffer, key)
        self._on_the_way.append(parcel)
        at = 0
        try:
            while at < total:
                room, _ = self._room_there.use(total)
                part = buffer[at : min(at + room, total)]
                parcel.works.append(self._group.send([part], self._rank, self._tag_out))
                self._num_sent += 1
                at += room
        except RuntimeError as e:
            raise self._failed(key, e, "take") from e
        parcel.number = self._num_sent
        return parcel

    def take(self, key: str, device: torch.device) -> Message:
        buffer = self._part(key)
        total, taken_there = _PREFIX.unpack(buffer[: _PREFIX.size].numpy().tobytes())
        if not _PREFIX.size < total <= _MAX_MESSAGE_BYTES:
            raise unreadable(self._peer, f"a message of {total} bytes")
        whole = buffer
        if total > len(buffer):
            whole = host_bytes(total)
            whole[: len(buffer)] = buffer
            at = len(buffer)
            while at < total:
                self._repost(buffer, total)
                buffer = self._part(key)
                size = min(len(buffer), total - at)
                whole[at : at + size] = buffer[:size]
                at += size
        front = whole[_PREFIX.size : min(total, _PREFIX.size + MAX_HEADER_BYTES)]
        header = unpack(front.numpy().tobytes(), self._peer)
        payload_at = -(-(_PREFIX.size + header.num_bytes) // ALIGNMENT) * ALIGNMENT
        if payload_at + header.layout.num_bytes != total:
            raise unreadable(self._peer, f"a message of {total} bytes with another number in its header")
        tensors = take(header.layout, whole[payload_at:total], device)
        self._repost(buffer, total)
        self._settle(taken_there)
        return Message(header.key, None, tensors)

    def post(self) -> None:
        """Post the first buffers."""
        for _ in range(DEPTH):
            self._post(host_bytes(self._first_bytes))

    def drop(self) -> None:
        """Let go of all work: kept alive it would keep the group's sockets open after an error."""
        for parcel in self._on_the_way:
            parcel.works.clear()
        self._on_the_way.clear()
        self._posted.clear()
        self._spare.clear()

    def finish(self, last: "Parcel") -> None:
        """Wait until everything up to `last` is with the other end."""
        while last.works:
            parcel = self._on_the_way.popleft()
            works, parcel.works = parcel.works, []
            try:
                while works:
                    works.pop(0).wait(self._timeout)
            except RuntimeError as e:
                works.clear()
                raise self._failed(parcel.key, e, "take") from e
            self._spare.append(parcel.buffer)

    def _settle(self, taken_there: int) -> None:
        """The other end has taken so many parts: waiting for those parcels takes no time."""
        while self._on_the_way and self._on_the_way[0].number <= taken_there:
            self.finish(self._on_the_way[0])

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        for i, spare in enumerate(self._spare):
            if len(spare) >= num_bytes:
                return self._spare.pop(i)
        self._spare.clear()  # what is there is too small, and so it would be next time
        return host_bytes(1 << (num_bytes - 1).bit_length())

    def _post(self, buffer: torch.Tensor) -> None:
        try:
            self._posted.append((buffer, self._group.recv([buffer], self._rank, self._tag_in)))
        except RuntimeError as e:
            raise self._failed("anything", e, "send") from e

    def _repost(self, buffer: torch.Tensor, message_bytes: int) -> None:
        _, room = self._room_here.use(message_bytes)
        self._post(buffer if len(buffer) == room else host_bytes(room))

    def _part(self, key: str) -> torch.Tensor:
        buffer, work = self._posted.popleft()
        try:
            work.wait(self._timeout)
        except RuntimeError as e:
            work = None
            raise self._failed(key, e, "send") from e
        self._num_taken += 1
        return buffer

    def _failed(self, key: str, cause: RuntimeError, verb: str) -> PeerLostError:
        self.drop()
        if "timed out" in str(cause).lower() or "timeout" in str(cause).lower():
            return stalled(self._peer, key, self._timeout_s, verb=verb)
        doing = "awaited from it" if verb == "send" else "sent to it"
        return lost(self._peer, f"{key} was {doing}", cause)


def _tag(source: Place, target: Place) -> int:
    """A tag for one direction; channels opened anew get new ones, so that nothing old is taken for new."""
    return zlib.crc32(f"{source.token}>{target.token}".encode()) & 0x7FFFFFFF


class Parcel:
    """A message on its way; it holds the bytes until they are with the other end."""

    def __init__(self, link: GlooLink, buffer: torch.Tensor, key: str) -> None:
        self._link, self.buffer, self.key = link, buffer, key
        self.works: list[Any] = []
        self.number = 0

    def wait(self) -> None:
        self._link.finish(self)
