"""How TCP connections of a job are made: a door on one address, opened to those who know its token.

The sender shows the token of the door and its own, both from the job's store: who cannot read the store gets
no further. Nothing is encrypted, as between the processes of torch.distributed.
"""

import hmac
import select
import socket
import time

from evener.runtime.channels.stop import Stop

_MAGIC = b"evener-1"
TOKEN_CHARS = 32
_HELLO_BYTES = len(_MAGIC) + 2 * TOKEN_CHARS
_MAX_STRANGERS = 64
_PATIENCE_S = 10.0  # for a stranger to show a token


class Door:
    """Listens on a free port of the address `host`. `token` is what a guest must show."""

    def __init__(self, host: str, token: str) -> None:
        self._token = token.encode()
        self._socket = socket.socket(_family(host), socket.SOCK_STREAM)
        self._socket.bind((host, 0))
        self._socket.listen(1024)
        self._socket.setblocking(False)
        self.address = f"{host} {self._socket.getsockname()[1]}"
        self._strangers: dict[socket.socket, tuple[bytes, float]] = {}
        self._guests: dict[bytes, socket.socket] = {}

    def guest(self, token: str) -> socket.socket | None:
        """The connection of the sender with this `token`, which must not block; None if it has not come."""
        self._let_in()
        return self._guests.get(token.encode())

    def watch(self, poll: select.poll) -> None:
        """Have `poll` wake up when `guest` may have another answer."""
        for connection in (self._socket, *self._strangers):
            poll.register(connection, select.POLLIN)

    def close(self) -> None:
        """Let nobody in any more, and everybody go."""
        for connection in (self._socket, *self._strangers, *self._guests.values()):
            connection.close()

    def _let_in(self) -> None:
        while len(self._strangers) < _MAX_STRANGERS:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                break
            connection.setblocking(False)
            self._strangers[connection] = b"", time.monotonic() + _PATIENCE_S
        for connection, (said, until_s) in tuple(self._strangers.items()):
            try:
                more = connection.recv(_HELLO_BYTES - len(said))
                said += more
            except BlockingIOError:
                more = b"wait"
            except OSError:
                more = b""
            if len(said) == _HELLO_BYTES or not more or time.monotonic() > until_s:
                del self._strangers[connection]
                self._welcome(connection, said)
            else:
                self._strangers[connection] = said, until_s

    def _welcome(self, connection: socket.socket, said: bytes) -> None:
        wanted = _MAGIC + self._token
        own = said[len(wanted) :]
        is_known = hmac.compare_digest(said[: len(wanted)], wanted) and len(own) == TOKEN_CHARS
        if is_known and own not in self._guests:
            self._guests[own] = connection
        else:
            connection.close()


def connect(address: str, door_token: str, own_token: str, timeout_s: float, stop: Stop) -> socket.socket:
    """A connection to the door at `address`, which must not block; OSError when there is none to be had."""
    host, _, port = address.partition(" ")
    connection = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect_ex((host, int(port)))
        poll = select.poll()
        poll.register(connection, select.POLLOUT)
        poll.register(stop, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            raise TimeoutError(f"{host} port {port} did not answer within {timeout_s:g} s")
        stop.check()
        failed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            raise OSError(failed, f"no connection to {host} port {port}")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.send(_MAGIC + door_token.encode() + own_token.encode())
    except BaseException:
        connection.close()
        raise
    return connection


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
