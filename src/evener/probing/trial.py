"""One process tries another over plain TCP with patterned data: latency, rate, whether it arrives as sent.

    dialler                                     waiter
    token, mode, seconds  ───────────────────►  checks the token, else hangs up
    "look":  15 x 64 B    ◄──────────────────►  sends each back                        latency = least / 2
             a block      ◄──────────────────►  checks it, sends one, which is checked
    "rate":  blocks until the answer comes      checks each, tells bytes a second after so many seconds

The pattern of a block follows from the token and the block's number, so that nothing that lies can guess it.
"""

import hmac
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

BLOCK_BYTES = 2**18
LOOK_BYTES = 2**16
PINGS = 15
PING_BYTES = 64
TOKEN_BYTES = 32
MOST_SECONDS = 5.0
MOST_WAITING = 256
_HEAD = struct.Struct(f"<{TOKEN_BYTES}s4sd")
_FOUND = struct.Struct("<Qdq")  # bytes, bytes a second, number of the first wrong block or -1
_NUMBER = struct.Struct("<Q")
_LOOK, _RATE = b"look", b"rate"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What an attempt saw; `error` is empty where all went well."""

    by: str = ""
    latency_s: float | None = None
    bytes_per_s: float | None = None
    error: str = ""


def pattern(token: str) -> bytes:
    """The bytes of every block after its number, the same for all who know the token."""
    return random.Random(token).randbytes(BLOCK_BYTES - _NUMBER.size)


class Waiter:
    """Answers those who know this process's token, until it is closed; a context manager."""

    def __init__(self, token: str, *, host: str = "") -> None:
        self.token = token
        self._pattern = pattern(token)
        self._listener = socket.create_server((host, 0), backlog=MOST_WAITING)
        self._room = threading.Semaphore(MOST_WAITING)
        self._open = True
        threading.Thread(target=self._accept, name="preflight", daemon=True).start()

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    def __enter__(self) -> "Waiter":
        return self

    def __exit__(self, *exc: object) -> None:
        self._open = False
        with suppress(OSError):  # wakes the thread that waits in it, which closing alone does not
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while self._open:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return  # closed
            if not self._room.acquire(blocking=False):
                peer.close()
                continue
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            with peer:
                peer.settimeout(MOST_SECONDS)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                token, mode, seconds = _HEAD.unpack(_exactly(peer, _HEAD.size))
                if not hmac.compare_digest(token, _bytes(self.token)):
                    return
                peer.sendall(token)
                if mode == _LOOK:
                    self._look(peer)
                elif mode == _RATE:
                    self._rate(peer, seconds)
        except (OSError, EOFError):
            return  # the dialler says what it saw
        finally:
            self._room.release()

    def _look(self, peer: socket.socket) -> None:
        for _ in range(PINGS):
            peer.sendall(_exactly(peer, PING_BYTES))
        block = _exactly(peer, LOOK_BYTES)
        wrong = 0 if block != _block(self._pattern, 0, LOOK_BYTES) else -1
        peer.sendall(_FOUND.pack(LOOK_BYTES, 0.0, wrong) + _block(self._pattern, 1, LOOK_BYTES))

    def _rate(self, peer: socket.socket, seconds: float) -> None:
        """Take blocks for so many seconds and tell how fast they came; what is on its way then is dropped."""
        buffer, expected = bytearray(BLOCK_BYTES), memoryview(self._pattern)
        view = memoryview(buffer)
        number, wrong, total, filled = 0, -1, 0, 0
        marks: list[tuple[float, int]] = []
        while not marks or marks[-1][0] - marks[0][0] < min(seconds, MOST_SECONDS):
            got = peer.recv_into(view[filled:])
            if not got:
                return
            total, filled = total + got, filled + got
            marks.append((time.monotonic(), total))
            if filled == BLOCK_BYTES:
                right = _NUMBER.unpack_from(buffer)[0] == number and view[_NUMBER.size :] == expected
                wrong = number if wrong < 0 and not right else wrong
                number, filled = number + 1, 0
        peer.sendall(_FOUND.pack(total, steady(marks), wrong))
        while peer.recv_into(view):  # until the dialler hangs up
            pass


def steady(marks: list[tuple[float, int]]) -> float:
    """Bytes a second after the first quarter of the time, in which TCP and shapers warm up.

    `marks` are (seconds, bytes so far). Example: 0, 1, 9, 17 and 25 bytes at 0, 1, 2, 3 and 4 s: 24 / 3 = 8.
    """
    (begin, _), (end, total) = marks[0], marks[-1]
    later, before = next(m for m in marks if m[0] >= begin + (end - begin) / 4)
    return (total - before) / (end - later) if end > later else 0.0


def look(address: str, port: int, token: str, *, timeout_s: float) -> Found:
    """Dial, measure the latency, and see whether a block goes both ways unchanged."""

    def talk(peer: socket.socket) -> Found:
        least = float("inf")
        ping = bytes(PING_BYTES)
        for _ in range(PINGS):
            before = time.perf_counter()
            peer.sendall(ping)
            if _exactly(peer, PING_BYTES) != ping:
                return Found(error=f"data arrives changed ({PING_BYTES} bytes sent and returned)")
            least = min(least, time.perf_counter() - before)
        blocks = pattern(token)
        peer.sendall(_block(blocks, 0, LOOK_BYTES))
        _, _, wrong = _FOUND.unpack(_exactly(peer, _FOUND.size))
        if wrong >= 0 or _exactly(peer, LOOK_BYTES) != _block(blocks, 1, LOOK_BYTES):
            return Found(latency_s=least / 2, error=f"data arrives changed (a block of {LOOK_BYTES} bytes)")
        return Found(latency_s=least / 2)

    return _dial(address, port, token, _LOOK, 0.0, timeout_s, talk)


def rate(address: str, port: int, token: str, *, seconds: float, timeout_s: float) -> Found:
    """Send blocks until the other side tells how fast they came in `seconds`, and whether as sent."""

    def talk(peer: socket.socket) -> Found:
        block, number, at = bytearray(_block(pattern(token), 0, BLOCK_BYTES)), 0, 0
        end = time.monotonic() + seconds + timeout_s
        peer.setblocking(False)
        while True:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            readable, writable, _ = select.select([peer], [peer], [], left)
            if readable:
                break
            if writable:
                at += peer.send(memoryview(block)[at:])
            if at == BLOCK_BYTES:
                number, at = number + 1, 0
                _NUMBER.pack_into(block, 0, number)
        peer.settimeout(timeout_s)
        _, bytes_per_s, wrong = _FOUND.unpack(_exactly(peer, _FOUND.size))
        error = f"data arrives changed (block {wrong} of {number})" if wrong >= 0 else ""
        return Found(bytes_per_s=bytes_per_s or None, error=error)

    return _dial(address, port, token, _RATE, seconds, timeout_s, talk)


def reach(host: str, port: int, *, come_s: float, silent_s: float) -> str:
    """Wait until something listens there; "" then, else what stood in the way.

    A host that refuses is up and may yet begin to listen: `come_s`. One that does not answer, or to which
    there is no route, is given `silent_s`.
    """
    begin = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=2.0).close()
            return ""
        except ConnectionRefusedError:
            error, limit = "connection refused", come_s
        except TimeoutError:
            error, limit = "no answer", silent_s
        except OSError as e:
            error, limit = (e.strerror or str(e)).lower(), silent_s
        waited = time.monotonic() - begin
        if waited + 0.2 > limit:
            return f"{error} for {waited:.0f} s"
        time.sleep(0.2)


def _dial(
    address: str,
    port: int,
    token: str,
    mode: bytes,
    seconds: float,
    timeout_s: float,
    talk: Callable[[socket.socket], Found],
) -> Found:
    """`talk` with the process that knows the token; what went wrong, in words, where it does not answer."""
    by = ""
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as peer:
            by = str(peer.getsockname()[0])
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.sendall(_HEAD.pack(_bytes(token), mode, seconds))
            if _exactly(peer, TOKEN_BYTES) != _bytes(token):
                return Found(by=by, error="somebody else answers there")
            found = talk(peer)
            return Found(by=by, latency_s=found.latency_s, bytes_per_s=found.bytes_per_s, error=found.error)
    except TimeoutError:
        return Found(by=by, error=f"no answer within {timeout_s:g} s")
    except EOFError:
        return Found(by=by, error="somebody else answers there, or it hung up")
    except OSError as e:
        return Found(by=by, error=(e.strerror or str(e)).lower())


def _bytes(token: str) -> bytes:
    return token.encode().ljust(TOKEN_BYTES, b"\0")[:TOKEN_BYTES]


def _block(blocks: bytes, number: int, num_bytes: int) -> bytes:
    return _NUMBER.pack(number) + blocks[: num_bytes - _NUMBER.size]


def _exactly(peer: socket.socket, num_bytes: int) -> bytes:
    """So many bytes; EOFError where the other side hangs up before."""
    parts, left = [], num_bytes
    while left:
        part = peer.recv(min(left, BLOCK_BYTES))
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
