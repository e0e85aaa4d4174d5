"""Where a device runs, told to the others through the job's store, and how two places are best joined."""

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from evener.core.figures import Value
from evener.core.files import decode, encode
from evener.errors import PeerLostError

Transport = Literal["local", "shared", "gloo"]
_MAX_PLACE_BYTES = 4096


class Place(Value, frozen=True, kw_only=True):
    """Where `device` runs.

    `process` is a random name of its process, `host` of the running kernel and its network namespace (empty
    where that cannot be told). `address` is its unix socket (empty where there are none), `token` a random
    name of this end, `rank` its process in the group, `buffer_bytes` how long its first receive buffers are.
    """

    device: str
    process: str
    host: str
    address: str
    token: str
    rank: int
    buffer_bytes: int

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]{0,100}", self.address):
            raise ValueError(f"{self.address!r} is no name of a socket")
        if self.rank < 0 or not 4096 <= self.buffer_bytes <= 2**30:
            raise ValueError(f"rank {self.rank} or buffers of {self.buffer_bytes} bytes are out of range")


def choose_transport(a: Place, b: Place) -> tuple[Transport, str]:
    """How `a` and `b` exchange messages, and the sentence why; the same from both ends.

    Example: two processes with the same `host` and unix sockets are joined by "shared".
    """
    pair = f"{a.device} and {b.device}"
    if a.process == b.process:
        return "local", f"{pair} run in one process: tensors are handed over"
    if not a.host or not b.host:
        return "gloo", f"{pair} cannot tell whether they share a host: Gloo"
    if a.host != b.host:
        return "gloo", f"{pair} are on different hosts: Gloo, through host memory"
    if not a.address or not b.address:
        return "gloo", f"{pair} are on one host that lacks shared memory by file descriptor: Gloo"
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


def find(device: str, store: dist.Store, timeout_s: float) -> Place:
    """Where `device` runs; PeerLostError when it has not said so within `timeout_s`."""
    key = f"channel/{device}"
    try:
        store.wait([key], timedelta(seconds=timeout_s))
        raw = store.get(key)
    except (dist.DistStoreError, RuntimeError) as e:
        raise PeerLostError(
            f"{device} did not open its channel within {timeout_s:g} s",
            numbers=str(e).splitlines()[0],
            remedy=f"look for the first error of {device}",
        ) from e
    return decode(raw[:_MAX_PLACE_BYTES], Place, f"what {device} says of its place")
