"""Rows of a table in a file that is always as of one step, whatever stops the process that writes it.

    rows   one record a row: what the last commit left
    log    records written since, appended: id and record; then, to commit, count, step and checksum

Until its last word is on the disk, a log counts for nothing: whoever opens the folder drops it. After that it
counts in full: whoever opens the folder copies its records into `rows` and empties it, twice if need be.
"""

import fcntl
import json
import os
import threading
import zlib
from pathlib import Path

import numpy as np
import torch

from evener.errors import EnvironmentBrokenError, FileError

_END = np.dtype([("magic", "<u8"), ("count", "<u8"), ("step", "<u8"), ("checksum", "<u8")])
_MAGIC = 0x65766E_7461626C
_APPLIED_AT_ONCE = 65_536  # records


class ColdFile:
    """`num_rows` records of `width` numbers in `folder`, with the step of the last commit.

    Raises FileError where the folder cannot be made, holds another table or somebody has it open,
    EnvironmentBrokenError where the disk is full; what was committed is then still there.
    """

    def __init__(self, folder: Path, num_rows: int, width: int, dtype: torch.dtype) -> None:
        self.folder, self.num_rows, self.width = folder, num_rows, width
        self._numbers = np.dtype("<f8" if dtype == torch.float64 else "<f4")
        self._record = np.dtype([("id", "<i8"), ("row", self._numbers, (width,))])
        self.step = -1
        self.is_new = not (folder / "table.json").exists()
        shape = {"rows": num_rows, "width": width, "dtype": self._numbers.str}
        if self.is_new:
            self._make(shape)
        self._check(shape)
        self._rows = np.memmap(folder / "rows", self._numbers, "r+", shape=(num_rows, width))
        self._log = open(folder / "log", "r+b")  # noqa: SIM115
        try:
            fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise FileError(f"{folder} is open in another process", remedy="a folder a run") from e
        self.reading = threading.Lock()  # of whoever reads the rows of the last commit: the next one waits
        self._recover()
        self._where = np.full(num_rows, -1, dtype=np.int64)  # number of a row's newest record in the log
        self._count, self._checksum = 0, 0

    @property
    def record_bytes(self) -> int:
        """Of one row in the log."""
        return self._record.itemsize

    @property
    def logged(self) -> int:
        """Records that a commit would have to copy."""
        return self._count

    def read(self, ids: np.ndarray) -> np.ndarray:
        """The newest records of `ids`: (ids, width)."""
        where = self._where[ids]
        found = np.asarray(self._rows[ids])
        newer = np.flatnonzero(where >= 0)
        if len(newer):
            self._log.flush()
            log = np.memmap(self.folder / "log", self._record, "r", shape=(self._count,))
            found[newer] = log["row"][where[newer]]
        return found

    def write(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Put `records` into the log; they are read from there at once and kept by the next commit."""
        entries = np.empty(len(ids), self._record)
        entries["id"], entries["row"] = ids, records
        data = entries.tobytes()
        try:
            self._append(data)
        except OSError as e:
            raise self._full(e, len(data)) from e
        self._where[ids] = np.arange(self._count, self._count + len(ids))
        self._count += len(ids)
        self._checksum = zlib.crc32(data, self._checksum)

    def commit(self, step: int) -> None:
        """Make what was written so far what the file holds, as of `step`; waits for who reads the former."""
        end = np.array([(_MAGIC, self._count, step, self._checksum)], _END).tobytes()
        with self.reading:
            try:
                self._append(end)
                self._log.truncate()
                os.fsync(self._log.fileno())
            except OSError as e:
                raise self._full(e, len(end)) from e
            self._apply(self._count, step)
        self._where.fill(-1)
        self._count, self._checksum = 0, 0

    def keep(self, name: str, data: bytes) -> None:
        """The file `name` beside the rows has this `data`, come what may."""
        try:
            write_durably(self.folder / name, data)
        except OSError as e:
            raise self._full(e, len(data)) from e

    def committed(self, first: int, stop: int) -> np.ndarray:
        """A copy of the records that the last commit left; for another thread while it holds `reading`."""
        return np.array(self._rows[first:stop])

    def begin_anew(self) -> None:
        """The rows are about to be filled: until the next commit, nobody takes them for a table."""
        with self.reading:
            self.keep("step", b"-1")
            self.step = -1
            self._log.truncate(0)
        self._where.fill(-1)
        self._count, self._checksum = 0, 0

    def fill(self, first: int, rows: np.ndarray) -> None:
        """First numbers of the records from row `first` on, of a new table."""
        self._rows[first : first + len(rows), : rows.shape[1]] = rows

    def close(self) -> None:
        """Let go of the files; what was not committed is dropped when they are next opened."""
        self._log.close()
        del self._rows

    def _apply(self, count: int, step: int) -> None:
        if count:
            log = np.memmap(self.folder / "log", self._record, "r", shape=(count,))
            for first in range(0, count, _APPLIED_AT_ONCE):
                part = log[first : first + _APPLIED_AT_ONCE]
                self._rows[part["id"]] = part["row"]  # of a row that comes twice the later one stays
        self._rows.flush()
        self.keep("step", str(step).encode())
        self._log.truncate(0)
        self._log.flush()
        os.fsync(self._log.fileno())
        self.step = step

    def _append(self, data: bytes) -> None:
        self._log.seek(self._count * self._record.itemsize)
        self._log.write(data)
        self._log.flush()

    def _recover(self) -> None:
        try:
            self.step = int((self.folder / "step").read_text())
        except ValueError as e:
            raise FileError(f"{self.folder / 'step'} is no number", remedy="another folder") from e
        size = self._log.seek(0, os.SEEK_END)
        if size < _END.itemsize:
            self._log.truncate(0)
            return
        self._log.seek(size - _END.itemsize)
        (end,) = np.frombuffer(self._log.read(_END.itemsize), _END)
        count = int(end["count"])
        whole = int(end["magic"]) == _MAGIC and count * self._record.itemsize + _END.itemsize == size
        if whole and self._sum_of(count) == int(end["checksum"]):
            self._apply(count, int(end["step"]))
        else:
            self._log.truncate(0)

    def _sum_of(self, count: int) -> int:
        self._log.seek(0)
        checksum, left = 0, count * self._record.itemsize
        while left:
            data = self._log.read(min(left, 2**24))
            checksum, left = zlib.crc32(data, checksum), left - len(data)
        return checksum

    def _make(self, shape: dict) -> None:
        size = self.num_rows * self.width * self._numbers.itemsize
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise FileError(
                f"the folder {self.folder} cannot be made: {e.strerror}",
                remedy="a folder on a disk that this user may write to",
            ) from e
        try:
            with open(self.folder / "rows", "wb") as file:
                if size:
                    os.posix_fallocate(
                        file.fileno(), 0, size
                    )  # a full disk is found here, not in a page fault
            (self.folder / "log").touch()
            write_durably(self.folder / "step", b"-1")
            write_durably(self.folder / "table.json", json.dumps(shape).encode())
        except OSError as e:
            raise self._full(e, size) from e

    def _check(self, shape: dict) -> None:
        path = self.folder / "table.json"
        try:
            held = json.loads(path.read_text())
        except (OSError, ValueError) as e:
            raise FileError(f"{path} cannot be read: {e}", remedy="another folder") from e
        size = self.num_rows * self.width * self._numbers.itemsize
        if held != shape or (self.folder / "rows").stat().st_size != size:
            raise FileError(
                f"{self.folder} holds another table",
                numbers=f"{held} there, {shape} wanted, {size} bytes of rows",
                remedy="another folder, or remove this one",
            )

    def _full(self, error: OSError, size: int) -> EnvironmentBrokenError:
        kept = f"what was committed last, step {self.step}, is there in full"
        return EnvironmentBrokenError(
            f"the table in {self.folder} cannot be written: {error.strerror}",
            numbers=f"{size} bytes more; {kept if self.step >= 0 else 'nothing was committed before'}",
            remedy="room on that disk, a folder on another one, or a larger cache",
        )


def write_durably(path: Path, data: bytes) -> None:
    """The file is the old one or the new one, also after a power cut."""
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
