"""A disk whose power can be cut before any operation, and what it then has lost."""

import shutil
from pathlib import Path
from typing import Literal

from evener.runtime.checkpoints.files import Disk, Writing

Loss = Literal["nothing", "contents", "names"]


class PowerCut(BaseException):
    """The power is gone: nothing of the program runs any more."""


class CutDisk:
    """The real disk for `operations` operations, then a power cut.

    `lose` does afterwards what a disk may do with all that was not synced: "contents" are cut to half,
    "names" (new files and folders, renames) are as they were before.
    """

    def __init__(self, operations: int | None = None) -> None:
        self.count, self._limit, self._disk = 0, operations, Disk()
        self._unsynced: set[Path] = set()
        self._made: dict[Path, set[Path]] = {}
        self._renamed: dict[Path, list[tuple[Path, Path]]] = {}

    def operate(self) -> None:
        """Count one operation; PowerCut when the limit is reached."""
        if self._limit is not None and self.count >= self._limit:
            raise PowerCut
        self.count += 1

    def make_folder(self, path: Path) -> None:
        self.operate()
        if not path.exists():
            self._made.setdefault(path.parent, set()).add(path)
        self._disk.make_folder(path)

    def create(self, path: Path) -> Writing:
        self.operate()
        self._made.setdefault(path.parent, set()).add(path)
        self._unsynced.add(path)
        return _CutFile(self, path, self._disk.create(path))

    def rename(self, source: Path, target: Path) -> None:
        self.operate()
        self._disk.rename(source, target)
        self._renamed.setdefault(target.parent, []).append((source, target))
        moved = {p: target / p.relative_to(source) for p in self._unsynced if p.is_relative_to(source)}
        self._unsynced = {moved.get(p, p) for p in self._unsynced}

    def sync_folder(self, path: Path) -> None:
        self.operate()
        self._made.pop(path, None)
        self._renamed.pop(path, None)

    def remove(self, path: Path) -> None:
        for inner in sorted(path.rglob("*")) if path.is_dir() else []:
            self.operate()
            self._disk.remove(inner)
        self.operate()
        self._disk.remove(path)

    def synced(self, path: Path) -> None:
        self._unsynced.discard(path)

    def lose(self, loss: Loss) -> None:
        if loss == "contents":
            for path in self._unsynced:
                if path.exists():
                    raw = path.read_bytes()
                    path.write_bytes(raw[: len(raw) // 2])
        if loss == "names":
            for pairs in self._renamed.values():
                for source, target in reversed(pairs):
                    if target.exists() and not source.exists():
                        target.rename(source)
            for paths in self._made.values():
                for path in paths:
                    if path.is_dir():
                        shutil.rmtree(path)
                    else:
                        path.unlink(missing_ok=True)


class _CutFile:
    def __init__(self, disk: CutDisk, path: Path, file: Writing) -> None:
        self._disk, self._path, self._file = disk, path, file

    def write(self, piece: memoryview) -> None:
        try:
            self._disk.operate()
        except PowerCut:
            self._file.write(piece[: len(piece) // 2])
            raise
        self._file.write(piece)

    def sync(self) -> None:
        self._disk.operate()
        self._file.sync()
        self._disk.synced(self._path)

    def close(self) -> None:
        self._file.close()


class FullDisk(Disk):
    """A disk with room for `room` bytes in each file."""

    def __init__(self, room: int) -> None:
        self._room = room

    def create(self, path: Path) -> Writing:
        return _FullFile(super().create(path), self._room)


class _FullFile:
    def __init__(self, file: Writing, room: int) -> None:
        self._file, self._room = file, room

    def write(self, piece: memoryview) -> None:
        if len(piece) > self._room:
            self._file.write(piece[: self._room])
            raise OSError(28, "No space left on device")
        self._room -= len(piece)
        self._file.write(piece)

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()
