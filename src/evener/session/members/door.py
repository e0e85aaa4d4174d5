"""Where a process knocks that wants to join a running job, and how both sides prove who they are.

    door    {"version": …, "nonce": a}
    guest   {"nonce": b, "proof": HMAC(token, "guest" a b)}
    door    {"proof": HMAC(token, "door" a b), "store_port": …, "request": …}   or   {"refused": why}

The token never travels. A wrong proof is refused after a second, and reported. What follows, the job's store,
is torch's own: as open as that of torchrun to whoever can reach its port.
"""

import hashlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from evener import __version__
from evener.core.figures import Value
from evener.core.files import decode, encode, read_bytes
from evener.errors import EnvironmentBrokenError, FileError, RefusedError
from evener.session.request import TOKEN_FILE, Request

MAX_BYTES, MAX_TOKEN_BYTES = 2**24, 4096
PATIENCE_S = 10.0
PENALTY_S = 1.0


class Welcome(Value, frozen=True, kw_only=True):
    """What a guest is given: where the job's store listens, and what was asked of the run."""

    store_host: str
    store_port: int
    request: Request


def new_token(folder: Path) -> str:
    """A token for this job, in a file that only its owner can read; makes the run's folder if need be."""
    token = secrets.token_urlsafe(32)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / TOKEN_FILE
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(token, encoding="utf-8")
    return token


def read_token(path: Path) -> str:
    """The token in a file; FileError when there is none."""
    try:
        return read_bytes(path, MAX_TOKEN_BYTES).decode("ascii").strip()
    except (FileError, UnicodeDecodeError) as e:
        raise FileError(
            f"no token can be read from {path}",
            numbers=e.what if isinstance(e, FileError) else "it holds no plain text",
            remedy=f"--token-file with the file {TOKEN_FILE} of the job's run folder, copied to this host",
        ) from e


class Door:
    """Listens at `host`:`port` (0: any free one) and welcomes who has the token; a thread of its own."""

    def __init__(
        self,
        token: str,
        welcome: Welcome,
        report: Callable[[str], None],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._token, self._welcome, self._report = token.encode(), welcome, report
        try:
            self._socket = socket.create_server((host, port))
        except OSError as e:
            raise EnvironmentBrokenError(
                f"cannot listen for devices that join at {host}:{port}: {e.strerror}",
                remedy="another --open-at address of this host, or a free port",
            ) from e
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more."""
        with suppress(OSError):  # wakes the thread that waits in it, which closing alone does not
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                guest, address = self._socket.accept()
            except OSError:
                return  # closed
            with guest:
                guest.settimeout(PATIENCE_S)
                try:
                    self._receive(guest, str(address[0]))
                except (OSError, ValueError, KeyError, TypeError) as e:
                    self._report(f"someone at {address[0]} knocked and did not make sense: {e}")

    def _receive(self, guest: socket.socket, address: str) -> None:
        ours = secrets.token_hex(16)
        _say(guest, {"version": __version__, "nonce": ours})
        told = _hear(guest)
        theirs = str(told["nonce"])
        if not _is_same(told["proof"], _proof(self._token, "guest", ours, theirs)):
            self._report(f"refused a device at {address}: its token is not that of this job")
            time.sleep(PENALTY_S)
            _say(guest, {"refused": "the token is not that of this job"})
            return
        welcome = encode(self._welcome).decode()
        _say(guest, {"proof": _proof(self._token, "door", ours, theirs), "welcome": welcome})


def knock(host: str, port: int, token: str) -> Welcome:
    """Ask to be let into the job at `host`:`port`.

    RefusedError when the token is wrong on either side, EnvironmentBrokenError when nobody answers.
    """
    key = token.encode()
    try:
        with socket.create_connection((host, port), timeout=PATIENCE_S) as door:
            greeting = _hear(door)
            theirs, ours = str(greeting["nonce"]), secrets.token_hex(16)
            _say(door, {"nonce": ours, "proof": _proof(key, "guest", theirs, ours)})
            told = _hear(door)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise EnvironmentBrokenError(
            f"no job answers at {host}:{port}: {e}",
            remedy="the address that the job printed; --open-at there, when it runs on another host",
        ) from e
    if "refused" in told:
        raise RefusedError(str(told["refused"]), remedy=f"the file {TOKEN_FILE} of the job's run folder")
    if not _is_same(told.get("proof"), _proof(key, "door", theirs, ours)):
        raise RefusedError(
            f"who answers at {host}:{port} does not know this token", remedy="check the address"
        )
    return decode(str(told["welcome"]).encode(), Welcome, "what the job says")


def _proof(key: bytes, who: str, door: str, guest: str) -> str:
    return hmac.new(key, f"{who} {door} {guest}".encode(), hashlib.sha256).hexdigest()


def _is_same(given: object, wanted: str) -> bool:
    """In a time that does not tell where they differ."""
    return hmac.compare_digest(str(given).encode(errors="replace"), wanted.encode())


def _say(to: socket.socket, what: dict[str, Any]) -> None:
    to.sendall(json.dumps(what).encode() + b"\n")


def _hear(source: socket.socket) -> dict[str, Any]:
    """One line of JSON, bounded in length and time."""
    heard, end = bytearray(), time.monotonic() + PATIENCE_S
    while not heard.endswith(b"\n"):
        part = source.recv(65536)
        heard += part
        if not part or len(heard) > MAX_BYTES or time.monotonic() > end:
            raise ValueError(f"{len(heard)} bytes and no end of a line")
    try:
        return dict(json.loads(heard))
    except RecursionError as e:  # a megabyte of brackets: it would end the thread of the door
        raise ValueError("JSON that is nested too deeply") from e
