"""A stream of bytes as messages: each is the length of its header, the header, the tensors' bytes.

Small messages come out of one read into a buffer; of a large one, what is not in the buffer yet is read
straight into the memory of its tensors. Padding is left out: a stream needs none.
"""

import socket
import struct
from collections import deque

import torch

from evener.runtime.channels.messages import MAX_HEADER_BYTES, Header, unpack, unreadable
from evener.runtime.raw import raw

_LENGTH = struct.Struct("<I")
_BUFFER_BYTES = 2**16


class Frame:
    """One message: its header, and tensors in host memory, pinned or not, once all of it is there."""

    def __init__(self, header: Header, *, pin: bool) -> None:
        self.header = header
        specs = header.layout.specs
        self.tensors = [torch.empty(s.num_bytes, dtype=torch.uint8, pin_memory=pin) for s in specs]
        self.num_bytes = header.layout.num_bytes
        views = zip(self.tensors, specs, strict=True)
        self.missing = deque(_bytes_of(tensor) for tensor, spec in views if spec.num_bytes)

    def finished(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The tensors on `device`; leaves where the sender's needed a gradient."""
        result = []
        for memory, spec in zip(self.tensors, self.header.layout.specs, strict=True):
            tensor = memory.view(spec.dtype).view(spec.shape).to(device)
            result.append(tensor.requires_grad_() if spec.requires_grad else tensor)
        return tuple(result)


class Frames:
    """Reads the messages of `source` from a socket, whatever parts they arrive in.

    `pins` is for messages that go on to an accelerator: pinning opens one in a process, be it a CPU's own.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        self._frame: Frame | None = None
        self.pins = False
        self.num_read = 0

    def read(self, connection: socket.socket) -> Frame | None:
        """The next message; None when the socket, which must not block, has no more for now.

        ConnectionResetError at the end of the stream, ReductionMismatchError for bytes that are no message.
        """
        while True:
            frame = self._frame = self._frame or self._begun()
            if frame is not None:
                self._fill(frame)
                if not frame.missing:
                    self._frame = None
                    return frame
            try:
                if frame is not None:
                    num = connection.recv_into(frame.missing[0])
                    _advance(frame.missing, num)
                else:
                    num = connection.recv_into(self._buffer[self._end :])
                    self._end += num
            except BlockingIOError:
                return None
            if not num:
                raise ConnectionResetError("its connection was closed")
            self.num_read += num

    def _begun(self) -> Frame | None:
        """The message whose header is whole in the buffer."""
        there = self._end - self._start
        if there >= _LENGTH.size:
            (header_bytes,) = _LENGTH.unpack_from(self._buffer, self._start)
            if not 0 < header_bytes <= MAX_HEADER_BYTES:
                raise unreadable(self._source, f"a header of {header_bytes} bytes")
            at = self._start + _LENGTH.size
            if there >= _LENGTH.size + header_bytes:
                self._start = at + header_bytes
                return Frame(unpack(bytes(self._buffer[at : self._start]), self._source), pin=self.pins)
        self._buffer[:there] = self._buffer[self._start : self._end]  # room for the longest header behind it
        self._start, self._end = 0, there
        return None

    def _fill(self, frame: Frame) -> None:
        """Move what the buffer has of `frame` to its tensors."""
        while frame.missing and self._start < self._end:
            num = min(len(frame.missing[0]), self._end - self._start)
            frame.missing[0][:num] = self._buffer[self._start : self._start + num]
            self._start += num
            _advance(frame.missing, num)


def _advance(views: deque[memoryview], num: int) -> None:
    """The first `num` bytes of `views`, none of which is empty, are done."""
    while num:
        if num < len(views[0]):
            views[0] = views[0][num:]
            return
        num -= len(views.popleft())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]  # numpy's stubs lack the buffer protocol


def framed(header: bytes, tensors: tuple[torch.Tensor, ...]) -> list[memoryview]:
    """The bytes of a message, in parts: those of contiguous tensors in host memory are not copied."""
    views = [memoryview(_LENGTH.pack(len(header)) + header)]
    for tensor in tensors:
        if tensor.numel():
            views.append(_bytes_of(raw(tensor.detach().to("cpu").contiguous())))
    return views


def beyond(views: list[memoryview], num: int) -> memoryview:
    """A copy of what follows the first `num` bytes of `views`."""
    rest = deque(v for v in views if len(v))
    _advance(rest, num)
    return memoryview(b"".join(rest))
