"""Devices that want to leave or to join say so in the store; the leading device answers.

device   wish/3: {leave lab1/b}  ──►  leading device: a plan without it, generation 5 is prepared
device   answer/3: generation 5  ◄──  all stop for generation 5 after the next step
"""

import signal
import threading
from contextlib import suppress

from evener.core.figures import Value
from evener.core.fleet import Device, Link
from evener.core.profile import Profile
from evener.session.meeting import Meeting
from evener.session.members.identity import Identity

WISHES = "wishes"  # how many there were
ANOTHER_NAME = "--devices with another one: each device is in a job once"


class Wish(Value, frozen=True, kw_only=True):
    """What `device` asks for. A joiner describes itself and brings the profile of its kind.

    It is answered from step `from_step` on.
    """

    device: str
    leaves: bool = False
    joins: Device | None = None
    links: tuple[Link, ...] = ()
    identity: Identity | None = None
    profile: Profile | None = None
    from_step: int = 0


class Answer(Value, frozen=True, kw_only=True):
    """The generation that grants a wish, or why it is refused."""

    generation: int | None = None
    why_not: str = ""
    remedy: str = ""


def make_wish(meeting: Meeting, wish: Wish) -> int:
    """Tell a wish; its number."""
    number = meeting.store.add(WISHES, 1)
    meeting.put(f"wish/{number}", wish)
    return number


def _wish_to_leave(meeting: Meeting, here: str) -> None:
    with suppress(RuntimeError):  # the store has gone: there is no job to leave any more
        make_wish(meeting, Wish(device=here, leaves=True))


def leave_on_sigterm(meeting: Meeting, here: str) -> None:
    """Let SIGTERM mean: hand over what only this device holds, then go. A second one ends it at once."""
    connection = meeting.connected()

    def leave(*_) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # The main thread may hold its connection while it waits, and a handler must not wait for it.
        threading.Thread(target=_wish_to_leave, args=(connection, here)).start()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)
