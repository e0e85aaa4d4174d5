"""Reading a run's folder with suspicion: it may come from anybody.

Only the names below are opened, never through a link, never anything but a plain file, never more than so
many bytes. What cannot be read is told in a sentence and left out; nothing in a file names another file.
"""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from evener.core.figures import Figure, Value
from evener.core.files import decode
from evener.core.fleet import Fleet
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.core.records import StepRecord
from evener.core.trace import Trace
from evener.core.words import counted
from evener.errors import EvenerError, FileError
from evener.report.chrome import read_chrome_trace
from evener.report.results import RunReport

T = TypeVar("T")
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
}
"""The files of a run that are ever opened, and the most bytes that are read of each."""

MOST_SAMPLES, MOST_MICRO_BATCHES, MOST_STEPS = 10**12, 10**6, 2**53


class RunInfo(Value, frozen=True, kw_only=True):
    """What a run says of itself when it begins: run.json. `started_at` is ISO 8601 with its offset."""

    name: str
    total_steps: int
    rehearse: bool = False
    started_at: str = ""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What report.json holds beside the figures: how a run ended."""

    report: RunReport | None
    decisions: tuple[str, ...] = ()
    rehearsal: str = ""
    timings_hold: bool = True
    parameters_agree: bool = True
    heldout_first: float | None = None
    heldout_loss: float | None = None
    heldout_metrics: dict[str, float] | None = None
    figures: dict[str, float] | None = None
    peak_bytes: dict[str, Figure] | None = None


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The files of a run as values; `problems` are sentences on what could not be read."""

    name: str
    plan: Plan
    records: tuple[StepRecord, ...] = ()
    traces: tuple[Trace, ...] = ()
    info: RunInfo | None = None
    ending: Ending | None = None
    fleet: Fleet | None = None
    profile: Profile | None = None
    problems: tuple[str, ...] = ()


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


def read_run(path: str | Path) -> RunFiles:
    """The run in the folder at `path`. Raises FileError when it has no readable plan."""
    folder = Folder(path)
    raw = folder.read("plan.json")
    if raw is None:
        raise FileError(f"{path} holds no plan.json", remedy="the folder that evener train named at its end")
    plan = _bounded(decode(raw, Plan, f"plan.json of {folder.name}"))
    problems: list[str] = []
    records, said = read_records(folder)
    return RunFiles(
        name=folder.name,
        plan=plan,
        records=records,
        info=_value(folder, "run.json", lambda raw: decode(raw, RunInfo, "run.json"), problems),
        traces=_value(folder, "trace.json", lambda raw: read_chrome_trace(raw, "trace.json"), problems) or (),
        ending=_value(folder, "report.json", read_ending, problems),
        fleet=_value(folder, "fleet.json", lambda raw: decode(raw, Fleet, "fleet.json"), problems),
        profile=_value(folder, "profile.json", lambda raw: decode(raw, Profile, "profile.json"), problems),
        problems=(*said, *problems),
    )


def _bounded(plan: Plan) -> Plan:
    """`plan`, if it is of a size that can be laid out; a file of a few bytes may name billions."""
    micro_batches = sum(-(-p.samples // p.micro_batch) for p in plan.pipelines)
    if plan.global_batch > MOST_SAMPLES or micro_batches > MOST_MICRO_BATCHES:
        raise FileError(
            f"plan.json has {plan.global_batch:.3g} samples a step in {micro_batches:.3g} micro-batches",
            numbers=f"the most are {MOST_SAMPLES:.0e} and {MOST_MICRO_BATCHES:.0e}",
            remedy="the plan of a run",
        )
    return plan


def _value(folder: Folder, name: str, convert: Callable[[bytes], T], problems: list[str]) -> T | None:
    try:
        raw = folder.read(name)
        return None if raw is None else convert(raw)
    except EvenerError as e:
        problems.append(e.what)
    except (RecursionError, ValueError, OverflowError) as e:
        problems.append(f"{name} was not read: {type(e).__name__} {e}")
    return None


def read_ending(raw: bytes) -> Ending:
    """How the run ended, from report.json; fields that evener did not write are passed over."""
    try:
        found = msgspec.json.decode(raw)
        assert isinstance(found, dict), "no JSON object"
        known = {f.name for f in msgspec.structs.fields(RunReport)}
        own = {name: value for name, value in found.items() if name in known}
        report = msgspec.convert(own, RunReport) if "efficiency" in own else None
        kinds = {name: kind for name, kind in Ending.__annotations__.items() if name != "report"}
        rest: dict[str, Any] = {n: msgspec.convert(found[n], k) for n, k in kinds.items() if n in found}
        return Ending(report=report, **rest)
    except (msgspec.MsgspecError, AssertionError, ValueError) as e:
        raise FileError(f"report.json was not read: {e}", remedy="the file as the run wrote it") from e


def read_records(folder: Folder) -> tuple[tuple[StepRecord, ...], tuple[str, ...]]:
    """The newest records of metrics.jsonl, and sentences on what was left out."""
    try:
        with folder.open("metrics.jsonl") as (handle, found):
            start = max(0, found.st_size - LIMITS["metrics.jsonl"])
            raw = read_exactly(handle, found.st_size - start, start)
    except FileNotFoundError:
        return (), ()
    except FileError as e:
        return (), (e.what,)
    said = []
    if start:
        raw = raw.partition(b"\n")[2]
        said.append(f"only the newest {LIMITS['metrics.jsonl'] // MIB} MiB of metrics.jsonl were read")
    records, odd, _ = parse_records(raw)
    if odd:
        said.append(f"{counted(odd, 'line')} of metrics.jsonl hold no step record and were left out")
    return records, tuple(said)


def parse_records(raw: bytes) -> tuple[tuple[StepRecord, ...], int, int]:
    """(records, lines that are none, bytes of an unfinished last line) of some lines of metrics.jsonl."""
    *lines, tail = raw.split(b"\n")
    records: list[StepRecord] = []
    odd = 0
    for line in lines:
        try:
            record = msgspec.json.decode(line, type=StepRecord)
        except (msgspec.MsgspecError, RecursionError):
            odd += 1
            continue
        if max(record.step, record.samples) < MOST_STEPS:
            records.append(record)
        else:
            odd += 1
    return tuple(records), odd, len(tail)
