"""A standby for the job's store, in each process that joined from elsewhere: the job outlasts its first host.

store is lost ──► each survivor moves to the first standby that answers ──► the roll is called there

Where standbys listen is told with the turn of each generation, so all know it before they need it. A device
that `evener train` started ends with the store that it was started with, and serves none.
"""

from pathlib import Path

from msgspec.structs import replace

from evener.core.tell import tell
from evener.session.meeting import Meeting, serve_store
from evener.session.members.door import Door, Welcome

TOLD_AGAIN = ("profile", "tables")  # read after the start too; a roll makes the rest anew


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
