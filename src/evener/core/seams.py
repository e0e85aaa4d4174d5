"""The four places where a rehearsal stands in for hardware. The runtime is handed these and knows no more.

executor ──run(action, work)──► Driver   runs an action on a device, owns its clock
executor ──all_reduce(buffer)─► Wire     sums a buffer over devices, asynchronously
executor ──send, receive──────► Channel  hands tensors from one device to another
owners   ──send, receive──────► Post     carries parts of state, which wait at the sender until asked for
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol


class Pending(Protocol):
    """A reduction or a message on its way."""

    def wait(self) -> None:
        """Return when the buffer holds the sum, or what was sent may go; raises when a peer is lost."""


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

    def on_host(self, work: Callable[[], Any]) -> Any:
        """Do `work` of the host's CPU for the device, in an action or between two; return its result."""
        ...

    def on_disk(self, read: int, written: int) -> None:
        """So many bytes of the host's disk were read and written for the device."""
        ...


class Wire(Protocol):
    """Moves tensors between the devices of a group."""

    def all_reduce(self, buffer: Any, key: str, *, exact_tail: int = 0) -> Pending:
        """Start summing `buffer` in place over all devices; `key` names it for errors.

        What stands behind the key's last comma names the buffer through all steps ("step 3, bucket 1"). Of a
        wire that compresses the last `exact_tail` values arrive as they are all the same.
        """
        ...


class Receiving(Protocol):
    """A message to come.

    `sent_s` is known after `wait`: when it left its maker, in seconds on the clock of the receiver's driver;
    None where the two clocks cannot be compared. Waiting until then was for a slower peer, after it for the
    link.
    """

    sent_s: float | None

    def wait(self) -> tuple[Any, ...]:
        """The tensors; raises when the peer is lost, does nothing for too long, or sent another key."""
        ...


class Channel(Protocol):
    """Moves tuples of tensors from device to device: what crosses a cut.

    Both ends name each message with the same key, "1SEND_F2 of step 3": within a step it may be asked for in
    another order than it was sent in.
    """

    def send(self, tensors: tuple[Any, ...], to: str, key: str) -> Pending:
        """Start sending to the device `to`; never waits for the other end.

        The tensors may go at once, what they are copied to may go when the result was waited for: once a
        step is soon enough. Between devices of one process they are handed over as they are.
        """
        ...

    def receive(self, source: str, key: str, *, device: Any) -> Receiving:
        """Expect the next message of `source`, to be put on the torch device `device`; returns at once.

        A tensor that needed a gradient where it was made arrives as a leaf that needs one.
        """
        ...

    def abort(self, reason: str) -> None:
        """End every wait, now and later, with a PeerLostError that says `reason`; from any thread."""
        ...

    def close(self) -> None:
        """Let go of all pairs; who still waits for this device then learns that it left."""
        ...


class Arriving(Protocol):
    """A parcel to come. `sent_s` is known after `wait`: when it was handed in, on the receiver's own clock.

    None where nothing but the parcel's real arrival counts.
    """

    sent_s: float | None

    def wait(self) -> None:
        """Return when the values are there; raises when the peer is lost."""


class Post(Protocol):
    """Carries flat tensors in host memory straight from one device to another.

    A parcel is only moved when the other end asks for it, so it may be handed in long before; until then its
    values are read from where they lie. Those between two devices with the same tag arrive in order, others
    in any. Safe from several threads, `reach` from one.
    """

    def send(self, values: Any, to: str, tag: int) -> Pending:
        """Hand in `values`; they may change when the result was waited for."""
        ...

    def receive(self, values: Any, source: str, tag: int) -> Arriving:
        """Ask for the next parcel of `source` with this tag, which must be as large as `values`."""
        ...

    def now(self) -> float | None:
        """The moment on the device's clock at which something is asked for or handed in."""
        ...

    def reach(self, since_s: Sequence[float | None], sizes: Mapping[str, int], *, adds: bool) -> None:
        """A buffer, under way since the last of `since_s`, is there: the device waited for it.

        `sizes` are its bytes by owner; `adds` for gradients on their way to owners, else parameters on their
        way back.
        """
        ...
