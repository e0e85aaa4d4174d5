"""A run's folder as it grows: only what is new is read, and nothing that is not the run's own."""

from pathlib import Path
from typing import Any

from evener.core.plan import Plan
from evener.core.records import StepRecord
from evener.errors import EvenerError, FileError
from evener.report.page.files import READERS, RunFiles, odd_lines, parse_records, read_part, read_plan
from evener.report.page.folder import MIB, Folder, read_exactly

MOST_RECORDS = 50_000
MOST_BYTES_A_LOOK = 8 * MIB
Mark = tuple[int, int, int]  # (inode, bytes, time of the last change): tells one state of a file from another


class Follower:
    """Follows the run in the folder at `path`; `look` reads what is new, `run` is what is known.

    Files that did not change keep the same values, so that what is made of them can be kept too. At most the
    newest `MOST_RECORDS` steps are held. FileError when `path` is no folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = Folder(path)
        self.records: list[StepRecord] = []
        self.seen = 0
        self._plan: Plan | None = None
        self._parts: dict[str, Any] = {}
        self._marks: dict[str, Mark | None] = {}
        self._problems: dict[str, str] = {}
        self._inode, self._offset, self._odd, self._dropped = 0, 0, 0, 0

    @property
    def run(self) -> RunFiles | None:
        """The run as it is known; None before its plan is there."""
        if self._plan is None:
            return None
        said = [x for x in self._problems.values() if x]
        if self._odd:
            said.append(odd_lines(self._odd))
        if self._dropped:
            said.append(f"the newest {len(self.records)} steps are shown, not the {self._dropped} before")
        return RunFiles(
            name=self.folder.name,
            plan=self._plan,
            records=tuple(self.records),
            problems=tuple(said),
            **self._parts,
        )

    def look(self) -> bool:
        """Read what is new; whether anything was."""
        changed = self._look_at_plan()
        for name, (field, _) in READERS.items():
            if self._moved(name):
                value, self._problems[name] = read_part(self.folder, name)
                self._parts.pop(field, None)
                if value is not None:
                    self._parts[field] = value
                changed = True
        return self._look_at_metrics() or changed

    def _look_at_plan(self) -> bool:
        if not self._moved("plan.json"):
            return False
        try:
            raw = self.folder.read("plan.json")
            self._plan = None if raw is None else read_plan(raw)
            self._problems["plan.json"] = ""
        except EvenerError as e:
            self._problems["plan.json"] = e.what
        return True

    def _moved(self, name: str) -> bool:
        """Whether the file differs from when this was last asked."""
        mark: Mark | None = None
        try:
            with self.folder.open(name) as (_, found):
                mark = (found.st_ino, found.st_size, found.st_mtime_ns)
        except FileNotFoundError:
            mark = None
        except FileError:
            mark = (-1, 0, 0)  # a link, say: reading it tells what is wrong, once
        if mark == self._marks.get(name):
            return False
        self._marks[name] = mark
        return True

    def _look_at_metrics(self) -> bool:
        try:
            with self.folder.open("metrics.jsonl") as (handle, found):
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset, self._odd, self._dropped = found.st_ino, 0, 0, 0
                    self.records.clear()
                raw = read_exactly(handle, min(found.st_size - self._offset, MOST_BYTES_A_LOOK), self._offset)
        except FileNotFoundError:
            return False
        except FileError as e:
            changed = self._problems.get("metrics.jsonl") != e.what
            self._problems["metrics.jsonl"] = e.what
            return changed
        records, odd, unfinished = parse_records(raw)
        if unfinished == MOST_BYTES_A_LOOK:  # one line as long as that is no record, and is passed over
            odd, unfinished = odd + 1, 0
        self._offset += len(raw) - unfinished
        self._odd += odd
        self.seen += len(records)
        self.records += records
        surplus = len(self.records) - MOST_RECORDS
        if surplus > 0:
            del self.records[:surplus]
            self._dropped += surplus
        return bool(records or odd)
