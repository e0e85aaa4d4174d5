"""The files of a run as values. What cannot be read is told in a sentence and left out."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from evener.core.figures import Figure, Value
from evener.core.files import decode
from evener.core.fleet import Fleet
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.core.records import StepRecord
from evener.core.trace import Trace
from evener.core.words import counted, printable
from evener.errors import EvenerError, FileError
from evener.report.chrome import read_chrome_trace
from evener.report.page.folder import LIMITS, MIB, Folder, read_exactly
from evener.report.results import RunReport

MOST_SAMPLES, MOST_MICRO_BATCHES, MOST_STEPS, LONGEST_STEP_S = 10**12, 10**6, 2**53, 1e9


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
    decisions: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def read_plan(raw: bytes) -> Plan:
    """The plan in `raw`, if it is of a size that can be laid out; a few bytes may name billions."""
    plan = decode(raw, Plan, "plan.json")
    micro_batches = sum(-(-p.samples // p.micro_batch) for p in plan.pipelines)
    if not 0 < plan.global_batch <= MOST_SAMPLES or micro_batches > MOST_MICRO_BATCHES:
        raise FileError(
            f"plan.json has {plan.global_batch:.3g} samples a step in {micro_batches:.3g} micro-batches",
            numbers=f"the most are {MOST_SAMPLES:.0e} and {MOST_MICRO_BATCHES:.0e}",
            remedy="the plan of a run",
        )
    odd = [n for n in (*plan.devices, *(x.device for x in plan.left_out)) if not n.isprintable()]
    if odd:
        raise FileError(f"plan.json names devices that cannot be printed: {odd[0]!r}", remedy="plain names")
    return plan


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
        said.append(odd_lines(odd))
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
        if max(record.step, record.samples) < MOST_STEPS and record.step_s < LONGEST_STEP_S:
            said = printable(record.skipped)
            records.append(record if said == record.skipped else replace(record, skipped=said))
        else:
            odd += 1
    return tuple(records), odd, len(tail)


def odd_lines(number: int) -> str:
    """Example: "1 line of metrics.jsonl left out: no step record"."""
    return f"{counted(number, 'line')} of metrics.jsonl left out: no step record"


def read_decisions(raw: bytes) -> tuple[str, ...]:
    """Sentences, one JSON string a line; other lines are passed over, as is one that is being written."""
    said = []
    for line in raw.split(b"\n")[:-1]:
        with suppress(msgspec.MsgspecError):
            said.append(msgspec.json.decode(line, type=str))
    return tuple(said)


READERS: dict[str, tuple[str, Callable[[bytes], Any]]] = {
    "run.json": ("info", lambda raw: decode(raw, RunInfo, "run.json")),
    "fleet.json": ("fleet", lambda raw: decode(raw, Fleet, "fleet.json")),
    "profile.json": ("profile", lambda raw: decode(raw, Profile, "profile.json")),
    "trace.json": ("traces", lambda raw: read_chrome_trace(raw, "trace.json")),
    "report.json": ("ending", read_ending),
    "decisions.jsonl": ("decisions", read_decisions),
}
"""The files that may be missing: the field of `RunFiles` that each fills, and how."""


def read_part(folder: Folder, name: str) -> tuple[Any, str]:
    """(value of the file `name`, sentence): None where there is none; the sentence tells what is wrong."""
    try:
        raw = folder.read(name)
        return (None if raw is None else READERS[name][1](raw)), ""
    except EvenerError as e:
        return None, e.what
    except (RecursionError, ValueError, OverflowError) as e:
        return None, f"{name} was not read: {type(e).__name__} {e}"


def read_run(path: str | Path) -> RunFiles:
    """The run in the folder at `path`. Raises FileError when it has no readable plan."""
    folder = Folder(path)
    raw = folder.read("plan.json")
    if raw is None:
        raise FileError(f"{path} holds no plan.json", remedy="the folder that evener train named at its end")
    plan = read_plan(raw)
    records, problems = read_records(folder)
    parts: dict[str, Any] = {}
    for name, (field, _) in READERS.items():
        value, problem = read_part(folder, name)
        if value is not None:
            parts[field] = value
        problems += (problem,) if problem else ()
    return RunFiles(name=folder.name, plan=plan, records=records, problems=problems, **parts)
