"""The two places where a rehearsal stands in for hardware. The runtime is handed these and knows no more.

executor ──run(action, work)──► Driver   runs an action on a device, owns its clock
executor ──all_reduce(buffer)─► Wire     sums a buffer over devices, asynchronously
"""

from collections.abc import Callable, Hashable
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

    def run(self, action: str, work: Callable[[], Any], *, signature: Hashable = ()) -> Any:
        """Do `work` as `action` ("0F3", "INPUT", "STEP"); return its result when the device has done it.

        `signature` is what else the cost depends on: sizes, and whether this backward launches reductions.
        Actions that differ only in their micro-batch number and have equal signatures cost the same.
        """
        ...


class Wire(Protocol):
    """Moves tensors between the devices of a group."""

    def all_reduce(self, buffer: Any, key: str) -> Pending:
        """Start summing `buffer` in place over all devices; `key` names it ("3/bucket1") for errors."""
        ...
