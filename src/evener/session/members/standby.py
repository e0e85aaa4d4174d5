"""A standby for the job's store, in each process that joined from elsewhere: the job outlasts its first host.

store is lost ──► each survivor moves to the first standby that answers ──► the roll is called there

Where standbys listen is told with the turn of each generation, so all know it before they need it. A device
that `evener train` started ends with the store that it was started with, and serves none.
"""

import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from msgspec.structs import replace

from evener.core.addresses import host_and_port
from evener.core.membership import Turn
from evener.core.tell import tell
from evener.policy.electorate import may_go_on
from evener.session.meeting import Meeting, serve_store, store_at
from evener.session.members.door import Door, Welcome
from evener.session.members.member import Member
from evener.session.members.wishes import leave_on_sigterm

TOLD_AGAIN = ("profile", "tables")  # read after the start too; a roll makes the rest anew
ANSWERS = timedelta(seconds=2)
MOVES_WITHIN_S = 6.0  # a store that is cut off is missed after 3 s, one that has ended after 0.9 s
NUMBERS = 1000  # generations at another store are numbered from the next multiple: rolls given up differ


class Standby:
    """Serves a store at `host`, empty until the job moves there; guests are then let in with `token`."""

    def __init__(self, host: str, token: str, token_file: Path, welcome: Welcome) -> None:
        self._store, self._port = serve_store(host)
        self._host, self._token, self._token_file, self._welcome = host, token, token_file, welcome
        self._told: dict[str, str] = {}
        self._door: Door | None = None

    @property
    def address(self) -> str:
        """Where it listens, "host:port"."""
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    def remember(self, meeting: Meeting) -> None:
        """Keep what `meeting` has that nobody else could tell again."""
        self._told = {key: meeting.store.get(key).decode() for key in TOLD_AGAIN if meeting.has(key)}

    def tell_again(self, meeting: Meeting) -> None:
        """Tell it to a store where nobody has yet."""
        for key, value in self._told.items():
            meeting.store.compare_set(key, "", value)

    def open(self) -> None:
        """Let others join at this store from now on, and tell how."""
        welcome = replace(self._welcome, store_host=self._host, store_port=self._port)
        self._door = self._door or Door(self._token, welcome, tell, host=self._host)
        more = " --rehearse FLEET.json --devices NAME" if welcome.request.rehearse else ""
        at = self.address.rpartition(":")[0]
        tell(
            f"others may join: evener train {welcome.request.script} --join {at}:{self._door.port} "
            f"--token-file {self._token_file}{more}"
        )

    def close(self) -> None:
        """Let nobody in any more."""
        if self._door:
            self._door.close()


def move(member: Member, before: Turn) -> str:
    """Meet at the first standby of `before` that answers from now on; the sentence that says where.

    Empty where this device may not: it is bound to the store that is lost, the job was brought to its end, or
    those who could come are too few to go on.
    """
    meeting, pulse, standby = member.meeting, member.pulse, member.standby
    if pulse is None or standby is None or pulse.is_over or member.here not in before.standbys:
        return ""
    for device, address in before.standbys.items():
        if address == meeting.at or not may_go_on(member.electorates, tuple(before.standbys), address)[0]:
            continue
        at = host_and_port(address)
        try:
            # Looked at first: where nobody listens torch tries again and again.
            socket.create_connection(at, ANSWERS.total_seconds()).close()
            store, beside = store_at(*at, ANSWERS), store_at(*at, ANSWERS)
            meeting.cut_off()  # a look at the store that is lost would go on for long
            pulse.move(beside, MOVES_WITHIN_S)
        except (OSError, RuntimeError):
            continue  # it is lost as well
        meeting.move_to(store, address)
        with suppress(RuntimeError):  # lost meanwhile: the roll finds out
            standby.tell_again(meeting)
        leave_on_sigterm(meeting, member.here)
        if address == standby.address:
            standby.open()
        return f"the job's store is lost; those who are left meet at {address}, on {device}"
    return ""
