"""Whose a run's folder is while the run goes on: a lock on a file in it, which the system lets go of.

Where the system has no file locks, nothing is claimed and nothing is known.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evener.errors import UsageError

CLAIM = ".claim"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """The run's folder belongs to this job alone; UsageError while another process of this host has it."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (folder / CLAIM).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise UsageError(
                f"another run writes to {folder}",
                remedy="another --run-dir; or wait for the run that is there",
            ) from e
        yield


def is_claimed(folder: Path) -> bool | None:
    """Whether a job has the folder now; None where that is not known, as nobody has claimed it yet."""
    try:
        import fcntl

        handle = os.open(folder / CLAIM, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
