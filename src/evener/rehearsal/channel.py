"""Links of the fleet file between stages: messages really travel, the moment they arrive is computed.

Each message carries when, on the links of the fleet, it left and arrives; the receiver's clock goes on from
there, so that what this machine needs to move it is absorbed by the next action's slot:

    sender    ──2F0──┤ left                       start   = max(left, the link's last end)
    link             └──wait──▓▓▓▓▓▓─latency─┐    end     = start + (seconds of the bytes - latency)
    receiver  ───────────wait────────────────┴──3F0──     arrival = end + latency
"""

import secrets
import threading
from typing import Any, Protocol

import torch
import torch.distributed as dist

from evener.core.fleet import Fleet
from evener.core.seams import Channel, Pending, Receiving
from evener.rehearsal.pacer import Pacer


class Lines(Protocol):
    """What messages go over one after another: a bus by name, or a pair of devices."""

    def take(self, line: str, from_s: float, occupied_s: float) -> float:
        """When a message that may start at `from_s` and holds `line` for `occupied_s` has passed."""
        ...


class OwnLines:
    """Lines that only devices of this process use; safe from a thread each.

    Example: two messages of 2 s that may start at 0 and at 1 have passed at 2 and at 4.
    """

    def __init__(self) -> None:
        self._free_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def take(self, line: str, from_s: float, occupied_s: float) -> float:
        with self._lock:
            end_s = max(from_s, self._free_s.get(line, 0.0)) + occupied_s
            self._free_s[line] = end_s
            return end_s


class SharedLines:
    """Lines that devices of several processes use: their ends are kept in the job's store.

    First come, first served: two that send in the same moment may be served in either order.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._seen: dict[str, str] = {}
        self._name = secrets.token_hex(8)
        self._num_taken = 0

    def take(self, line: str, from_s: float, occupied_s: float) -> float:
        self._num_taken += 1
        while True:
            seen = self._seen.get(line, "")
            end_s = max(from_s, float(seen.partition(" ")[0] or 0.0)) + occupied_s
            # Signed, so that another's message with the same end is not taken for this one.
            wanted = f"{end_s!r} {self._name} {self._num_taken}"
            self._seen[line] = self._store.compare_set(f"line/{line}", seen, wanted).decode()
            if self._seen[line] == wanted:
                return end_s


class PacedChannel:
    """A `Channel` over `inner` that takes the seconds of the fleet's links on the device's clock.

    Each pair and direction is a line of its own; pairs that name the same `bus` have one line together, in
    `buses` (which several processes share as `SharedLines`). Pairs without a link take no time.
    """

    def __init__(self, inner: Channel, driver: Pacer, fleet: Fleet, buses: Lines | None = None) -> None:
        self._inner, self._driver, self._fleet = inner, driver, fleet
        self._buses: Lines = buses or OwnLines()
        self._own: Lines = OwnLines()

    def send(self, tensors: tuple[torch.Tensor, ...], to: str, key: str) -> Pending:
        """Start sending as of the end of the device's last action; see `Channel.send`."""
        left_s = self._driver.launch()
        with self._driver.aside():
            arrival_s = self._arrival_s(to, left_s, sum(t.numel() * t.element_size() for t in tensors))
            times = torch.tensor([left_s, arrival_s], dtype=torch.float64)
            return self._inner.send((times, *tensors), to, key)

    def receive(self, source: str, key: str, *, device: Any) -> "PacedReceiving":
        """Expect a message; the device waits for it when its clock is before the arrival."""
        return PacedReceiving(self._inner.receive(source, key, device=device), self._driver)

    def abort(self, reason: str) -> None:
        """End every wait; see `Channel.abort` in `core/seams.py`."""
        self._inner.abort(reason)

    def close(self) -> None:
        self._inner.close()

    def _arrival_s(self, to: str, left_s: float, num_bytes: int) -> float:
        """Example: 1 MB over 1 ms + bytes / 1 GB/s leaves at 3 s and, the line free, arrives at 3.002."""
        link = self._fleet.link(self._driver.device.name, to)
        if link is None:
            return left_s
        latency_s = link.curve.points[0][1]
        occupied_s = link.curve.seconds(num_bytes) - latency_s
        line, lines = (link.bus, self._buses) if link.bus else (to, self._own)
        return lines.take(line, left_s, occupied_s) + latency_s


class PacedReceiving:
    """A message to come. After `wait`, `sent_s` and `arrival_s` are on the clocks of the fleet's devices."""

    def __init__(self, inner: Receiving, driver: Pacer) -> None:
        self._inner, self._driver = inner, driver
        self.sent_s: float | None = None
        self.arrival_s: float | None = None

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The tensors, when the device has them."""
        with self._driver.aside():
            times, *tensors = self._inner.wait()
            self.sent_s, self.arrival_s = times.tolist()  # read back from an accelerator: not its own doing
        self._driver.advance(self.arrival_s)
        return tuple(tensors)
