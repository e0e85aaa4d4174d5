"""The driver of a card: actions run on the device, and end when the device has done them.

host     ──F0 queued──┐ wait ┐──B0 queued──┐ wait ┐      an action ends when its stream is at rest
device   ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓┘▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓┘
copies   ──────▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒─────────      on streams of their own go on beside it
"""

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import msgspec
from torch.utils._python_dispatch import TorchDispatchMode

from evener.core.fleet import Device, Disk
from evener.rehearsal.counting import bytes_moved, is_free
from evener.rehearsal.device.card import Card
from evener.rehearsal.device.tensor import RehearsalTensor
from evener.rehearsal.driver import HOST_ACTION, PAUSE_S
from evener.rehearsal.trouble import Trouble
from evener.rehearsal.verdict import Lateness


class HostBytes(TorchDispatchMode):
    """Counts the bytes that operations on the host's own tensors read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if RehearsalTensor not in types and not is_free(func):
            self.num_bytes += bytes_moved(func, args, kwargs, out)
        return out


class CardDriver:
    """A `Driver` of `card`, whose clock must not count the host: it counts what it is told to.

    Actions named INPUT take the time they really take, and so do pauses longer than `PAUSE_S` between
    actions. All else takes what the card's roofline and copies say, and work of the host's CPU what its
    memory needs for the bytes at `host_bytes_per_s` (None: no time), as do bytes of its `disk`.
    """

    def __init__(
        self,
        card: Card,
        *,
        host_bytes_per_s: float | None = None,
        disk: Disk | None = None,
    ) -> None:
        assert not card.clock.host_counts, "a driver says itself what of the host counts"
        self.card, self.host_bytes_per_s, self.disk = card, host_bytes_per_s, disk
        self._left_s = time.monotonic()
        self._trouble = Trouble()
        self._lateness = Lateness(device=card.device.name)

    @property
    def device(self) -> Device:
        """The device of the fleet file."""
        return self.card.device

    def now(self) -> float:
        """Seconds on the device's clock; comparable within a host."""
        return self.card.clock.origin_s + self.card.clock.host_s

    def lateness(self) -> Lateness:
        """How well the clock was kept up to now."""
        return msgspec.structs.replace(self._lateness, lag_s=self.card.clock.lag_s)

    def run(self, action: str, work: Callable[[], Any], *, signature: Hashable = ()) -> Any:
        """Do `work` and return its result when the device would have it; see `Driver.run`."""
        card_clock = self.card.clock
        began_s = time.monotonic()
        if began_s - self._left_s > PAUSE_S:
            card_clock.spend(began_s - self._left_s)
            self._add(pause_s=began_s - self._left_s)
        self.card.factor = self._trouble.factor(self.now())
        start_s, lag_s = card_clock.host_s, card_clock.lag_s
        try:
            result = work()
            if action == HOST_ACTION:
                card_clock.spend(time.monotonic() - began_s)
                return result
            card_clock.wait(max(card_clock.host_s, card_clock.stream.free_s))
            late_s = max(0.0, card_clock.lag_s - lag_s)
            self._add(actions=1, total_s=card_clock.host_s - start_s, late=int(late_s > 0), late_s=late_s)
            return result
        finally:
            self._left_s = time.monotonic()

    def on_host(self, work: Callable[[], Any]) -> Any:
        """Do `work`; on the clock the host is busy for its bytes, read and written, at `host_bytes_per_s`."""
        with HostBytes() as moved:
            result = work()
        if self.host_bytes_per_s:
            self.card.clock.spend(moved.num_bytes / self.host_bytes_per_s)
        return result

    def on_disk(self, read: int, written: int) -> None:
        """On the clock the host waits for its disk to read and write so many bytes."""
        if self.disk:
            self.card.clock.spend(self.disk.seconds(read, written))

    def roomy(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the card's memory has no end."""
        return self.card.lifted()

    def slow(self, factor: float, for_s: float | None = None) -> None:
        """From now on every action takes `factor` times as long, for `for_s` seconds or for good."""
        self._trouble.slow(factor, self.now(), for_s)

    def disturb(self, noise: float, seed: str) -> None:
        """From now on every action takes a time drawn with a heavy tail, see `Trouble`."""
        self._trouble.disturb(noise, seed)

    def launch(self) -> float:
        """When what is queued until now will be done, on the device's clock: where a reduction starts."""
        clock = self.card.clock
        return clock.origin_s + max(clock.host_s, clock.stream.free_s)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Operations inside take no time of the device."""
        with self.card.aside():
            yield

    def advance(self, until_s: float) -> None:
        """The host waits until `until_s`; a moment that has passed changes nothing."""
        self.card.clock.wait(until_s - self.card.clock.origin_s)
        self._left_s = time.monotonic()

    def _add(self, **more: float) -> None:
        self._lateness = self._lateness.plus(**more)
