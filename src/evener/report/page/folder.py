"""Reading a run's folder with suspicion: it may come from anybody.

Only the names below are opened, never through a link, never anything but a plain file, never more than so
many bytes. Nothing in a file names another file.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evener.errors import FileError

MIB = 2**20
LIMITS = {
    "plan.json": 16 * MIB,
    "run.json": MIB,
    "report.json": 16 * MIB,
    "fleet.json": 16 * MIB,
    "profile.json": 64 * MIB,
    "trace.json": 128 * MIB,
    "profiled-step.json": 128 * MIB,
    "metrics.jsonl": 64 * MIB,
    "decisions.jsonl": MIB,
}
"""The files of a run that are ever opened, and the most bytes that are read of each."""


class Folder:
    """A run's folder: hands out the bytes of the files in `LIMITS`, and of no others.

    Raises FileError when `path` is no folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileError(
                f"{path} is no folder of a run", remedy="the folder that evener train named at its end"
            )

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[int, os.stat_result]]:
        """A descriptor of the plain file `name`, and what the system says of it.

        Raises FileNotFoundError where there is none, FileError for a link, a pipe or anything else.
        """
        if name not in LIMITS:
            raise FileError(f"{name!r} is no file of a run", remedy=f"one of {', '.join(LIMITS)}")
        place = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Without O_NONBLOCK a pipe that lies there would be waited for.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            handle = os.open(name, flags, dir_fd=place)
        except FileNotFoundError:
            raise
        except OSError as e:
            raise FileError(
                f"{name} was not read: {e.strerror}", remedy="a plain file; links are not followed"
            ) from e
        finally:
            os.close(place)
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise FileError(f"{name} was not read: it is no plain file", remedy="a plain file")
            yield handle, found
        finally:
            os.close(handle)

    def read(self, name: str) -> bytes | None:
        """The bytes of the file `name`; None where there is none, FileError where it is too large."""
        try:
            with self.open(name) as (handle, found):
                if found.st_size > LIMITS[name]:
                    raise FileError(
                        f"{name} was not read: it has {found.st_size} bytes",
                        numbers=f"the most is {LIMITS[name]}",
                        remedy="a shorter run, or a shorter trace",
                    )
                return read_exactly(handle, found.st_size)
        except FileNotFoundError:
            return None


def read_exactly(handle: int, count: int, start: int = 0) -> bytes:
    """At most `count` bytes of the open file from `start` on; fewer where the file ends."""
    parts = []
    while count > 0 and (part := os.pread(handle, min(count, 4 * MIB), start)):
        parts.append(part)
        start, count = start + len(part), count - len(part)
    return b"".join(parts)
