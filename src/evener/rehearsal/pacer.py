"""What a rehearsal's wires and channels, and the session, ask of a driver: its device's own clock."""

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from evener.core.fleet import Device
from evener.core.seams import Driver
from evener.rehearsal.verdict import Lateness


@runtime_checkable
class Roomy(Protocol):
    """A driver whose device can hold more than it has, for a while."""

    def roomy(self) -> AbstractContextManager[None]:
        """Inside, its memory has no end."""
        ...


@runtime_checkable
class Pacer(Driver, Protocol):
    """A `Driver` of a fleet file's device: `PacedDriver` is one of CPUs, `CardDriver` of accelerators."""

    @property
    def device(self) -> Device:
        """The device of the fleet file."""
        ...

    def launch(self) -> float:
        """When a message that is sent now leaves: what it carries is done then, on the device's clock."""
        ...

    def aside(self) -> AbstractContextManager[None]:
        """Operations inside are not the device's."""
        ...

    def advance(self, until_s: float) -> None:
        """The device waits until `until_s` on its clock; a moment that has passed changes nothing."""
        ...

    def slow(self, factor: float, for_s: float | None = None) -> None:
        """From now on every action takes `factor` times as long, for `for_s` seconds or for good."""
        ...

    def disturb(self, noise: float, seed: str) -> None:
        """From now on every action takes a time drawn with a heavy tail, see `Trouble`."""
        ...

    def lateness(self) -> Lateness:
        """How well the clock was kept up to now."""
        ...
