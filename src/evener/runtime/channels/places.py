"""Where a device runs, told to the others through the job's store, and how two places are best joined."""

import ipaddress
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from evener.core.figures import Value
from evener.core.files import decode, encode
from evener.errors import PeerLostError

Transport = Literal["local", "shared", "tcp"]
_MAX_PLACE_BYTES = 4096
_LOOK_S = 0.005


class Place(Value, frozen=True, kw_only=True):
    """Where `device` runs.

    `process` is a random name of its process, `host` of the running kernel and its network namespace (empty
    where that cannot be told). `address` is its unix socket (empty where there are none), `door` its IP
    address and TCP port, `token` a random name of this end that only the job knows.
    """

    device: str
    process: str
    host: str
    address: str
    door: str
    token: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]{0,100}", self.address):
            raise ValueError(f"{self.address!r} is no name of a socket")
        host, _, port = self.door.partition(" ")
        if self.door and not (_is_ip(host) and re.fullmatch(r"\d{1,5}", port) and 0 < int(port) < 65536):
            raise ValueError(f"{self.door!r} is no IP address with a port")
        if self.door and not re.fullmatch(r"[0-9a-f]{32}", self.token):
            raise ValueError("a token of another length than 32 characters")

    @property
    def is_reachable_from_afar(self) -> bool:
        """Whether other hosts could come to its door; a loopback address is each host's own."""
        return bool(self.door) and not ipaddress.ip_address(self.door.partition(" ")[0]).is_loopback


def choose_transport(a: Place, b: Place) -> tuple[Transport, str]:
    """How `a` and `b` exchange messages, and the sentence why; the same from both ends.

    Example: two processes with the same `host` and unix sockets are joined by "shared".
    """
    pair = f"{a.device} and {b.device}"
    if a.process == b.process:
        return "local", f"{pair} run in one process: tensors are handed over"
    if not a.host or not b.host:
        return "tcp", f"{pair} cannot tell whether they share a host: TCP"
    if a.host != b.host:
        return "tcp", f"{pair} are on different hosts: TCP, through host memory"
    if not a.address or not b.address:
        return "tcp", f"{pair} are on one host that lacks shared memory by file descriptor: TCP"
    return "shared", f"{pair} are on one host: shared memory, announced over a unix socket"


def this_host() -> str:
    """A name of the running kernel and network namespace, empty where there is none to be had."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def announce(place: Place, store: dist.Store) -> None:
    """Tell the others where a device runs."""
    store.set(f"channel/{place.device}", encode(place))  # type: ignore[arg-type]  # bytes are taken


def find(device: str, store: dist.Store, timeout_s: float, check: Callable[[], None] = lambda: None) -> Place:
    """Where `device` runs; PeerLostError when it has not said so within `timeout_s`.

    `check()` is asked now and then whether to go on, and raises if not.
    """
    key, until_s = f"channel/{device}", time.monotonic() + timeout_s
    why = ""
    try:
        while not store.check([key]) and time.monotonic() < until_s:
            check()
            time.sleep(_LOOK_S)
        if store.check([key]):
            return decode(store.get(key)[:_MAX_PLACE_BYTES], Place, f"what {device} says of its place")
    except (dist.DistStoreError, RuntimeError) as e:
        why = str(e).splitlines()[0]
    raise PeerLostError(
        f"{device} did not open its channel within {timeout_s:g} s",
        numbers=why,
        remedy=f"look for the first error of {device}",
    )


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
