"""Copies under way that the host did not wait for, and what catches a buffer that is used too early.

host → device   the buffer's version is remembered: a write before the copy ended is an error
device → host   the buffer holds NaN (or the largest integer) until the host has waited for the copy
"""

import torch

from evener.rehearsal.device.clock import Clock


class _Flight:
    def __init__(self, end_s: float, host: torch.Tensor, values: torch.Tensor | None) -> None:
        self.end_s, self.host, self.values = end_s, host, values
        self.version = host._version


class Flights:
    """All copies of a device that the host has not waited for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._flights: list[_Flight] = []
        clock.arrived = self.land

    def __bool__(self) -> bool:
        return bool(self._flights)

    def inwards(self, host: torch.Tensor, end_s: float) -> None:
        """`host` is being read until `end_s`."""
        self._flights.append(_Flight(end_s, host, None))

    def outwards(self, host: torch.Tensor, values: torch.Tensor, end_s: float) -> None:
        """`host` will hold `values` at `end_s`; until then whoever reads it reads nonsense."""
        host.fill_(float("nan") if host.is_floating_point() else _largest(host.dtype))
        self._flights.append(_Flight(end_s, host, values))

    def check(self) -> None:
        """RuntimeError if a buffer was written while its copy was under way."""
        for flight in self._flights:
            if flight.values is None and flight.host._version != flight.version:
                self._flights.remove(flight)
                raise RuntimeError(
                    f"a pinned buffer of shape {tuple(flight.host.shape)} was written while its copy to the "
                    "device was under way: on a real accelerator the device may get the new values. "
                    "Synchronize, or wait for an event recorded after the copy, before the buffer is used "
                    "again."
                )

    def land(self) -> None:
        """The host has waited: what ended until then has arrived. Called after each wait."""
        if not self._flights:
            return
        self.check()
        waited_s = self._clock.waited_s
        landed = [f for f in self._flights if f.end_s <= waited_s]
        self._flights = [f for f in self._flights if f.end_s > waited_s]
        for flight in landed:
            if flight.values is not None:
                flight.host.copy_(flight.values)


def _largest(dtype: torch.dtype) -> int:
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max
