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
from evener.errors import DividedError, PeerLostError
from evener.policy.electorate import may_go_on
from evener.session.meeting import Meeting
from evener.session.pulse import Pulse, begun_key

POLL_S = 0.003
MAY_COME_S = 5.0  # for devices that were silent to be heard again


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
    up and calls the next: two devices in two rolls would wait for each other without end; DividedError where
    too few are here for `MAY_COME_S`, as the others may go on elsewhere.
    """
    room.put(f"standing/{standing.device}", standing)
    end: float | None = None
    while not room.has("members"):
        failure = room.first_failure()
        if failure:
            raise failure.as_error()
        present = _present(room, expected, pulse.lost)
        if present is not None and present[0] == standing.device:
            goes_on, why = _may_go_on(room, present)
            if goes_on:
                # Should two believe that they are first, the store takes the first answer.
                room.store.compare_set("members", "", encode(Members(devices=present)).decode())
                break
            end = end or time.monotonic() + MAY_COME_S
            if time.monotonic() > end:
                raise DividedError(
                    "too few devices of the job reach each other, and the others may go on elsewhere",
                    numbers=why,
                    remedy="where they do, join them (--join); else start again with --resume",
                )
        if room.is_told(begun_key(number + 1)) and not room.has("members"):
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


def _may_go_on(room: Meeting, present: Sequence[str]) -> tuple[bool, str]:
    standings = [room.get(f"standing/{device}", Standing) for device in present]
    electorates = dict.fromkeys(e for s in standings for e in s.electorates)
    return may_go_on(electorates, [s.device for s in standings if s.electorates], room.at)


def _present(room: Meeting, expected: Sequence[str], lost: Mapping[str, str]) -> tuple[str, ...] | None:
    """Those who live, once all of them have told their standing."""
    living = [device for device in expected if device not in lost]
    if all(room.has(f"standing/{device}") for device in living):
        return tuple(living)
    return None
