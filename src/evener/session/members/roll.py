"""The roll call between two generations: who is still there, and what each of them has.

each device   standing ──────────────┐
each device   waits until all others have told theirs or are lost
the first one that lives             └─► members (the first to write wins) ──► how the job goes on
"""

import time
from collections.abc import Mapping, Sequence

from evener.core.figures import Value
from evener.core.files import encode
from evener.core.membership import Standing
from evener.errors import PeerLostError
from evener.session.meeting import Meeting
from evener.session.pulse import Pulse, begun_key

POLL_S = 0.003


class Members(Value, frozen=True, kw_only=True):
    """The devices of a generation, in the order of the roll; the first one says how the job goes on."""

    devices: tuple[str, ...]


def begin(meeting: Meeting, generation: int, here: str) -> None:
    """Tell everybody that the generation before has ended."""
    meeting.store.set(begun_key(generation), here)


def call_roll(
    room: Meeting, pulse: Pulse, expected: Sequence[str], standing: Standing, number: int
) -> tuple[Standing, ...] | None:
    """The standings of all members, in the order of `expected`; None where this device is not one of them.

    `room` is that of generation `number`. Waits for every device that lives, however long its step takes.
    Raises the failure of a device that ends the job for all; PeerLostError where somebody has given this roll
    up and calls the next: two devices in two rolls would wait for each other without end.
    """
    room.put(f"standing/{standing.device}", standing)
    while not room.has("members"):
        failure = room.first_failure()
        if failure:
            raise failure.as_error()
        present = _present(room, expected, pulse.lost)
        if present is not None and present[0] == standing.device:
            # Should two believe that they are first, the store takes the first answer.
            room.store.compare_set("members", "", encode(Members(devices=present)).decode())
            break
        if room.store.check([begun_key(number + 1)]) and not room.has("members"):
            raise PeerLostError(f"another device calls the roll of generation {number + 1}")
        if pulse.is_cut_off:
            raise PeerLostError(
                f"{standing.device} does not reach the job's store",
                remedy="look at the network and at the job's first host",
            )
        time.sleep(POLL_S)
    members = room.get("members", Members).devices
    if standing.device not in members:
        return None
    return tuple(room.get(f"standing/{device}", Standing) for device in members)


def _present(room: Meeting, expected: Sequence[str], lost: Mapping[str, str]) -> tuple[str, ...] | None:
    """Those who live, once all of them have told their standing."""
    living = [device for device in expected if device not in lost]
    if all(room.has(f"standing/{device}") for device in living):
        return tuple(living)
    return None
