"""A run's metrics as JSON lines: one StepRecord a line, written at once: a crash costs at most one line."""

import os
from pathlib import Path
from types import TracebackType

import msgspec

from evener.core.figures import Value
from evener.core.files import append_to, cannot_write, write_bytes
from evener.core.records import StepRecord
from evener.errors import FileError


class Metrics(Value, frozen=True, kw_only=True):
    """Records read back. `torn` is the sentence about an unfinished last line, empty when there is none."""

    records: tuple[StepRecord, ...]
    torn: str = ""


class MetricsWriter:
    """Appends records to the file at `path`; a context manager.

    An unfinished last line, left by a run that was killed, is cut off first: `torn` then says so.
    Raises FileError when the file cannot be opened or written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.torn = _mend(self.path)
            self._file = self.path.open("ab", buffering=0)  # nothing is left to write when it is closed
        except OSError as e:
            raise cannot_write(self.path, e) from e

    def append(self, record: StepRecord) -> None:
        """Write `record` as one line, whole or not at all. A loss that is not finite is written as null."""
        try:
            append_to(self._file, msgspec.json.encode(record) + b"\n")
        except OSError as e:
            raise cannot_write(self.path, e) from e

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: str | Path) -> Metrics:
    """The records in the file at `path`; an unfinished last line is left out and reported in `torn`.

    Raises FileError naming the line when any other line is no step record.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise FileError(f"cannot read {path}: {e.strerror}", remedy="the metrics file of a run") from e
    *lines, tail = raw.split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(msgspec.json.decode(line, type=StepRecord))
        except msgspec.DecodeError as e:
            raise FileError(
                f"line {number} of {path} is no step record: {e}",
                remedy="one JSON object a line, with step, samples and step_s; remove the line",
            ) from e
    if not tail:
        return Metrics(records=tuple(records))
    whole = _decoded(tail)
    if whole is not None:
        return Metrics(records=(*records, whole))
    return Metrics(records=tuple(records), torn=_torn(path, len(lines) + 1, len(tail)))


def drop_from(path: str | Path, step: int) -> int:
    """Take the records of `step` and later ones out of the file at `path`, as they will come again; how many.

    A file that is not there has none. Raises FileError as `read_metrics` does.
    """
    path = Path(path)
    if not path.exists():
        return 0
    records = read_metrics(path).records
    kept = [r for r in records if r.step < step]
    write_bytes(path, b"".join(msgspec.json.encode(r) + b"\n" for r in kept))
    return len(records) - len(kept)


def _mend(path: Path) -> str:
    """End the file at `path` with a whole line; returns the sentence about what was cut off."""
    if not path.exists():
        return ""
    raw = path.read_bytes()
    *lines, tail = raw.split(b"\n")
    if not tail:
        return ""
    if _decoded(tail) is not None:
        with path.open("ab") as f:
            f.write(b"\n")
        return ""
    os.truncate(path, len(raw) - len(tail))
    return _torn(path, len(lines) + 1, len(tail))


def _decoded(line: bytes) -> StepRecord | None:
    try:
        return msgspec.json.decode(line, type=StepRecord)
    except msgspec.DecodeError:
        return None


def _torn(path: Path, number: int, num_bytes: int) -> str:
    return f"line {number} of {path} is unfinished ({num_bytes} bytes) and was left out"
