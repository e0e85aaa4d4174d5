"""The two places where a rehearsal stands in for hardware. The runtime is handed these and knows no more.

executor ──run(action, work)──► Driver   runs an action on a device, owns its clock
executor ──all_reduce(buffer)─► Wire     sums a buffer over devices, asynchronously
"""

from collections.abc import Callable
from typing import Any, Protocol


class Pending(Protocol):
    """A reduction on its way."""

    def wait(self) -> None:
        """Return when the buffer holds the sum; raises when a peer is lost."""


class Driver(Protocol):
    """Runs actions on one device and owns that device's clock."""

    def now(self) -> float:
        """Seconds on this device's clock."""
        ...

    def run(self, action: str, work: Callable[[], Any]) -> Any:
        """Do `work` as `action` ("0F3", "STEP"); return its result once the device has really done it."""
        ...


class Wire(Protocol):
    """Moves tensors between the devices of a group."""

    def all_reduce(self, buffer: Any, key: str) -> Pending:
        """Start summing `buffer` in place over all devices; `key` names it ("3/bucket1") for errors."""
        ...
