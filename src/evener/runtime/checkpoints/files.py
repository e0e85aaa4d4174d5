"""The few things that a checkpoint does to a disk, in one place: where a test cuts the power."""

import os
import shutil
from pathlib import Path
from typing import Protocol


class Writing(Protocol):
    """A new file that is being written."""

    def write(self, piece: memoryview) -> None: ...

    def sync(self) -> None:
        """Return when what was written would survive a power cut."""
        ...

    def close(self) -> None: ...


class Files(Protocol):
    """Operations on files and folders; all raise OSError. What is not synced may be lost or cut short."""

    def make_folder(self, path: Path) -> None: ...

    def create(self, path: Path) -> Writing: ...

    def rename(self, source: Path, target: Path) -> None: ...

    def sync_folder(self, path: Path) -> None:
        """Return when names made in or moved into `path` would survive a power cut."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file or a folder with all that is in it; nothing there is no error."""
        ...


class Disk:
    """The real ones."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> Writing:
        return _DiskFile(path)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def sync_folder(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class _DiskFile:
    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115  # closed by `close`

    def write(self, piece: memoryview) -> None:
        while len(piece):
            piece = piece[self._file.write(piece) :]

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
