"""Links between hosts that are real: what crosses them takes the time it takes.

A device of a rehearsal is at a moment of its own clock, which this machine may reach early. What it sends
over a real link leaves at that moment, and what it waits for is there when it has really come:

    machine  ▓▓▓ sleep ● sends ─────► arrived       clock of the receiver = the later of its own and now
    clock    ───F0─────┤

Pacing inside a host stays: a sum over hosts ends no earlier than what it takes inside them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from evener.core.collectives import all_reduce_seconds, ring
from evener.core.exchange import Exchange
from evener.core.exchange_seconds import exchange_seconds
from evener.core.fleet import Fleet
from evener.core.seams import Arriving, Channel, Pending, Receiving, Wire
from evener.rehearsal.channel import PacedChannel
from evener.rehearsal.pacer import Pacer
from evener.rehearsal.post import PacedPost
from evener.rehearsal.waiting import wait_until


class Moments:
    """When a device acts on a real link: it sends no earlier than its own clock says, and waits really."""

    def __init__(
        self,
        driver: Pacer,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.driver = driver
        self._clock, self._sleep = clock, sleep

    def leave(self) -> float:
        """Return when what the device sends now would leave it; that moment on its clock."""
        launch_s = self.driver.launch()
        wait_until(launch_s, self._clock, self._sleep)
        return launch_s

    def arrive(self, at_least_s: float = 0.0) -> None:
        """Something is here now: the device's clock is not before this moment, nor `at_least_s`."""
        self.driver.advance(max(self._clock(), at_least_s))


class RealWire:
    """A `Wire` among devices of several hosts; `inside` gives the least seconds, those inside hosts."""

    def __init__(self, inner: Wire, moments: Moments, inside: Callable[[float], float]) -> None:
        self._inner, self._moments, self._inside = inner, moments, inside

    def all_reduce(self, buffer: Any, key: str, *, exact_tail: int = 0) -> Pending:
        """Start summing when the device would; see `Wire.all_reduce`."""
        launch_s = self._moments.leave()
        with self._moments.driver.aside():
            work = self._inner.all_reduce(buffer, key, exact_tail=exact_tail)
        least_s = self._inside(buffer.numel() * buffer.element_size())
        return _RealReduction(work, self._moments, launch_s + least_s)


class _RealReduction:
    def __init__(self, work: Pending, moments: Moments, at_least_s: float) -> None:
        self._work: Pending | None = work
        self._moments, self._at_least_s = moments, at_least_s

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            with self._moments.driver.aside():
                work.wait()
            self._moments.arrive(self._at_least_s)


def open_real_wire(inner: Wire, driver: Pacer, fleet: Fleet, devices: Sequence[str]) -> RealWire:
    """The wire of `driver`'s device among `devices` of several hosts; `fleet` has only links inside hosts."""
    hops = ring(fleet, devices)
    return RealWire(inner, Moments(driver), lambda num_bytes: all_reduce_seconds(num_bytes, hops))


def open_real_grouped_wire(inner: Wire, driver: Pacer, fleet: Fleet, exchange: Exchange) -> RealWire:
    """The same over groups; `fleet` has only links inside hosts."""
    return RealWire(inner, Moments(driver), lambda num_bytes: exchange_seconds(num_bytes, exchange, fleet))


class RealChannel:
    """A `Channel` whose messages to other hosts take real links; those inside the host are `paced`."""

    def __init__(self, paced: PacedChannel, moments: Moments) -> None:
        self._paced, self._moments = paced, moments
        self._host = moments.driver.device.host

    def send(self, tensors: tuple[torch.Tensor, ...], to: str, key: str) -> Pending:
        """Send as of the end of the device's last action; see `Channel.send`."""
        if self._is_afar(to):
            self._moments.leave()
        return self._paced.send(tensors, to, key)

    def receive(self, source: str, key: str, *, device: Any) -> Receiving:
        """Expect a message; from another host it is there when it has come."""
        coming = self._paced.receive(source, key, device=device)
        return _RealReceiving(coming, self._moments) if self._is_afar(source) else coming

    def abort(self, reason: str) -> None:
        """End every wait; see `Channel.abort` in `core/seams.py`."""
        self._paced.abort(reason)

    def close(self) -> None:
        self._paced.close()

    def _is_afar(self, device: str) -> bool:
        return device.partition("/")[0] != self._host


class _RealReceiving:
    def __init__(self, inner: Receiving, moments: Moments) -> None:
        self._inner, self._moments = inner, moments
        self.sent_s: float | None = None

    def wait(self) -> tuple[torch.Tensor, ...]:
        tensors = self._inner.wait()
        self.sent_s = self._inner.sent_s
        self._moments.arrive()
        return tensors


class RealPost:
    """A `Post` among devices of several hosts; what is inside the host is `paced`."""

    def __init__(self, paced: PacedPost, moments: Moments) -> None:
        self._paced, self._moments = paced, moments

    def send(self, values: torch.Tensor, to: str, tag: int) -> Pending:
        """Hand in `values` when the device has them; see `Post.send`."""
        self._moments.leave()
        return self._paced.send(values, to, tag)

    def receive(self, values: torch.Tensor, source: str, tag: int) -> Arriving:
        """Ask for a parcel; it is there when it has come."""
        return self._paced.receive(values, source, tag)

    def now(self) -> float | None:
        """The moment of the next `send` and `receive`."""
        return self._paced.now()

    def reach(self, since_s: Sequence[float | None], sizes: Mapping[str, int], *, adds: bool) -> None:
        """A buffer that came from others is here."""
        self._paced.reach(since_s, sizes, adds=adds)
        if any(s is not None for s in since_s):
            self._moments.arrive()


def paced_with_real_links(channel: Channel, driver: Pacer, fleet: Fleet, lines: Any) -> RealChannel:
    """The channel of `driver`'s device over `channel`; `fleet` has only links inside hosts."""
    return RealChannel(PacedChannel(channel, driver, fleet, lines), Moments(driver))
