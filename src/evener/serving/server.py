"""A server for the live view, in a thread beside whatever else this process waits for."""

import socket
import threading
import time
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

import uvicorn

from evener.core.addresses import host_and_port
from evener.core.tell import tell
from evener.core.threads import stand_back
from evener.errors import EnvironmentBrokenError
from evener.serving.access import Access, token_for
from evener.serving.app import live_app
from evener.serving.feed import Feed

START_S = 10.0
GOODBYE_S = 3.0


class LiveServer:
    """Shows the run in the folder at `path` at `address` ("host:port"); a context manager.

    `say` is told where the page is, with the token where one is needed. EnvironmentBrokenError when
    the address cannot be had.
    """

    def __init__(self, path: str | Path, address: str, say: Callable[[str], None] = tell) -> None:
        host, port = host_and_port(address, example="127.0.0.1:8080; port 0 is any free one")
        self.token = token_for(host)
        self._say = say
        self._socket = _bound(host, port)
        self.port = self._socket.getsockname()[1]
        shown = reached_at(host)
        self.url = f"http://{f'[{shown}]' if ':' in shown else shown}:{self.port}/"
        self.feed = Feed(path)
        app = live_app(self.feed, Access(token=self.token, cookie=f"evener_{self.port}"))
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,  # addresses can hold the token
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            limit_concurrency=64,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="evener live view", daemon=True)

    def _run(self) -> None:
        stand_back()
        self._server.run(sockets=[self._socket])

    def __enter__(self) -> "LiveServer":
        self._thread.start()
        end = time.monotonic() + START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                raise EnvironmentBrokenError(f"the live view did not start at {self.url}")
            time.sleep(0.01)
        where = f"{self.url}?token={self.token}" if self.token else self.url
        self._say(f"live view: {where}")
        return self

    def __exit__(self, *exc: object) -> None:
        """Let onlookers have the last state, then end."""
        self.feed.closing = True
        end = time.monotonic() + GOODBYE_S
        while self.feed.onlookers and time.monotonic() < end:
            time.sleep(0.02)
        self._server.should_exit = True
        self._thread.join(GOODBYE_S)
        self._socket.close()


def reached_at(host: str) -> str:
    """The address under which others find a server that listens at `host`.

    Of "0.0.0.0" and "::", which are all addresses of this host, it is the one from which its packets leave,
    or the host's name where there is no way out. Any other is as it was given.
    """
    try:
        here = ip_address(host)
    except ValueError:
        return host
    if not here.is_unspecified:
        return host
    family, elsewhere = {4: (socket.AF_INET, "192.0.2.1"), 6: (socket.AF_INET6, "2001:db8::1")}[here.version]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))  # set aside for documentation, and nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, socket.SOCK_STREAM)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(where)
        except OSError:
            found.close()
            raise
        return found
    except OSError as e:
        raise EnvironmentBrokenError(
            f"cannot listen at {host}:{port}: {e.strerror or e}",
            remedy="--listen 127.0.0.1:0 takes any free port",
        ) from e
