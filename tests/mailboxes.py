"""Process groups of threads of one process: messages lie in mailboxes. For wires over groups."""

import threading
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch

from evener.core.exchange import PIECE_BYTES, Exchange
from evener.runtime.wires.grouped import GroupedWire
from evener.runtime.wires.open import open_grouped
from evener.runtime.wires.shared import HEAD_BYTES, Memory

WAIT_S = 10.0


class Post:
    """All mailboxes of a job; `lose(device)` has every wait for it fail."""

    def __init__(self) -> None:
        self.boxes: dict[tuple, SimpleQueue] = defaultdict(SimpleQueue)
        self._lock = threading.Lock()
        self._memories: dict[tuple[str, ...], Memory] = {}

    def share(self, group: Any, members: Sequence[str], rooms: int) -> Memory:
        """Memory of all members of a group, in place of `share_memory`."""
        num_bytes = HEAD_BYTES + rooms * PIECE_BYTES
        made = Memory({m: torch.empty(num_bytes, dtype=torch.uint8) for m in members})
        return self._memories.setdefault(tuple(members), made)

    def box(self, *key: Any) -> SimpleQueue:
        with self._lock:
            return self.boxes[key]

    def lose(self, device: str) -> None:
        with self._lock:
            for (_, source, _, _), box in self.boxes.items():
                if source == device:
                    box.put(None)


class MailGroup:
    """One device's end of a group; the part of torch's ProcessGroup that messages need."""

    def __init__(self, post: Post, devices: Sequence[str], here: str, number: int) -> None:
        self._post, self._devices, self._here, self._number = post, tuple(devices), here, number

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        box = self._post.box((self._number, tag), self._here, self._devices[to], "")
        box.put(tensors[0].clone())
        return _Sent()

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        box = self._post.box((self._number, tag), self._devices[source], self._here, "")
        return _Coming(box, tensors[0])


class _Sent:
    def wait(self, patience: timedelta) -> None:
        return


class _Coming:
    def __init__(self, box: SimpleQueue, room: torch.Tensor) -> None:
        self._box, self._room = box, room

    def wait(self, patience: timedelta) -> None:
        try:
            came = self._box.get(timeout=WAIT_S)
        except Empty:
            raise RuntimeError("nothing came") from None
        if came is None:
            raise RuntimeError("Connection closed by peer")
        assert len(came) <= len(self._room), "a message larger than its room ends the process"
        self._room[: len(came)] = came


def wires(
    exchange: Exchange, post: Post, seed: int = 0, *, shares: bool = True, summed: bool = False
) -> dict[str, GroupedWire]:
    """A wire for every device, by name; the members of a group share memory or send messages."""
    share = post.share if shares else lambda *_: None
    made = {}
    for here in exchange.devices:
        numbers = iter(range(100))

        def new_group(devices: Sequence[str], backend: str, here: str = here, numbers=numbers) -> Any:
            return MailGroup(post, devices, here, next(numbers))

        made[here] = open_grouped(exchange, here, seed, new_group, share=share, summed=summed)
    return made
