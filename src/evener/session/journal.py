"""The leading process's record of a run: files while it goes on, one report at the end."""

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from evener.core.figures import Figure, Value
from evener.core.files import append, write, write_bytes
from evener.core.order import batches_in
from evener.core.plan import Plan
from evener.core.records import StepRecord, TableRecord
from evener.core.tell import tell
from evener.core.trace import Span, Trace
from evener.core.words import counted
from evener.errors import FileError
from evener.rehearsal.verdict import Lateness, verdict
from evener.report.accounting import report_by_prediction
from evener.report.chrome import chrome_trace
from evener.report.live import LiveView
from evener.report.lookups import lookup_lines
from evener.report.metrics import MetricsWriter, read_metrics
from evener.report.page.files import RunInfo
from evener.report.plans import plan_text
from evener.report.results import Evaluation, RunReport
from evener.report.text import report_text
from evener.runtime.hardware import ALLOCATED
from evener.session.checkpoints.resume import METRICS
from evener.session.loop.heldout import Heldout
from evener.session.planning.decide import samples_to_train
from evener.session.recipe import Recipe
from evener.session.request import Request


class Outcome(Value, frozen=True, kw_only=True):
    """What a run leaves: its report, its plan, its decisions, and whether a rehearsal's timings hold.

    `heldout_first` is the held-out loss before the first step; `heldout_loss` and `heldout_metrics` (means)
    are those after the last. `peak_bytes` are measured: on an accelerator what its allocator held, on a CPU
    the whole process. `lookups` are those of each device in all steps, by table.
    """

    report: RunReport | None
    plan: Plan
    run_dir: str
    decisions: tuple[str, ...] = ()
    heldout_first: float | None = None
    heldout_loss: float | None = None
    heldout_metrics: dict[str, float] = {}
    figures: dict[str, float] = {}
    timings_hold: bool = True
    rehearsal: str = ""
    parameters_agree: bool = True
    peak_bytes: dict[str, Figure] = {}
    lookups: dict[str, tuple[TableRecord, ...]] = {}

    def as_json(self) -> dict[str, Any]:
        """One flat object: the report's fields and these."""
        own = msgspec.to_builtins(self)
        return (own.pop("report") or {}) | own


class Journal:
    """Writes plan, metrics and trace of a run and shows it live; on a following process it does nothing.

    A file that cannot be written is an error before the first step. After it that is told and ends no
    training: records wait for room.
    """

    def __init__(self, request: Request, recipe: Recipe) -> None:
        self.recipe, self._request = recipe, request
        self.folder, self._quiet = Path(request.run_dir), request.quiet
        self._records: list[StepRecord] = []
        self._unwritten: deque[StepRecord] = deque()
        self._decisions_kept = 0
        self._refused: dict[str, str] = {}  # what the folder did not take, by file
        self._metrics: MetricsWriter | None = None
        self._live: LiveView | None = None
        self._told = 0
        self._at_start: int | None = None  # sentences that a person read when the run began
        self.since = 0  # the report is of the steps from here on: those under the last plan
        self.peak_bytes: dict[str, Figure] = {}
        self.lookups: dict[str, dict[str, TableRecord]] = {}  # by device and table
        self.heldout_first: Heldout | None = None
        self.heldout_last: Heldout | None = None

    def __enter__(self) -> "Journal":
        return self

    def open(self, plan: Plan, *, leads: bool) -> None:
        """Write and show from here on, under `plan`, if this process `leads`."""
        if not leads:
            return
        self._attempt("plan.json", lambda path: write(path, plan))
        size = len(self.recipe.dataset)
        total = samples_to_train(self._request, size, self.recipe.global_batch)
        steps = batches_in(total, size, plan.global_batch)
        info = RunInfo(
            name=self.recipe.name or Path(self._request.script).stem,
            total_steps=steps,
            rehearse=self._request.rehearse,
            started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        )
        self._attempt("run.json", lambda path: write(path, info))
        if self._metrics is None:
            self._attempt(METRICS, self._begin_metrics)
        if not self._quiet:
            print(plan_text(plan), file=sys.stderr)
            if self._live:
                self._live.__exit__(None, None, None)
            self._live = LiveView(plan, steps, time.monotonic, Console(file=sys.stderr))
            self._live.__enter__()

    def _begin_metrics(self, path: Path) -> None:
        """And write what the device that led before did not come to write, or wrote where none can see."""
        self._metrics = MetricsWriter(path)
        written = max((r.step for r in read_metrics(path).records), default=-1)
        self._unwritten.extend(r for r in self._records if r.step > written)
        self._write_records(path)

    def _write_records(self, path: Path) -> None:
        while self._metrics and self._unwritten:
            self._metrics.append(self._unwritten[0])
            self._unwritten.popleft()

    def _attempt(self, name: str, write_to: Callable[[Path], object]) -> None:
        """Write a file of the folder. What does not go once training has begun is told once, and kept."""
        path = self.folder / name
        try:
            write_to(path)
        except FileError as e:
            if not self._records:
                raise
            if name not in self._refused:
                tell(f"{e.what}; the training goes on without it")
            self._refused[name] = e.what
        else:
            self._refused.pop(name, None)

    def __exit__(self, *exc: Any) -> None:
        if self._live:
            self._live.__exit__(*exc)
        if self._metrics:
            self._metrics.close()

    def add(self, record: StepRecord) -> None:
        """Take in one step's record: on every device, as any of them may come to lead."""
        self._records.append(record)
        if self._metrics:
            self._unwritten.append(record)
            self._attempt(METRICS, self._write_records)
        if self._live:
            self._live.update(record)

    def tell(self, decisions: Sequence[str]) -> None:
        """Show the sentences that are new since the last call, and keep them for who looks on."""
        if self._metrics and (new := decisions[self._decisions_kept :]):
            lines = b"".join(msgspec.json.encode(s) + b"\n" for s in new)
            self._attempt("decisions.jsonl", lambda path: append(path, lines))
            self._decisions_kept += 0 if "decisions.jsonl" in self._refused else len(new)
        if self._live:
            self._at_start = len(decisions) if self._at_start is None else self._at_start
            for sentence in decisions[self._told :]:
                self._live.say(sentence)
        self._told = len(decisions)

    def conclude(
        self,
        plan: Plan,
        spans: list[Span],
        decisions: list[str],
        lateness: list[Lateness],
        checksums: list[dict[str, str]],
    ) -> Outcome:
        """The outcome of the run, written to the run folder and returned. `plan` is the last one in force."""
        first = min((s.start_s for s in spans), default=0.0)
        moved = tuple(
            msgspec.structs.replace(s, start_s=s.start_s - first, end_s=s.end_s - first) for s in spans
        )
        trace = Trace(source="measured", spans=moved, steps=len({s.step for s in spans}))
        self._attempt("trace.json", lambda path: write_bytes(path, chrome_trace(trace)))
        held, sentence = verdict(lateness) if lateness else (True, "")
        report = self._report(plan)
        if METRICS in self._refused:
            lacks = counted(len(self._unwritten), "step")
            decisions.append(f"{METRICS} lacks the last {lacks}: {self._refused[METRICS]}")
        outcome = Outcome(
            report=report,
            plan=plan,
            run_dir=str(self.folder),
            decisions=tuple(decisions),
            heldout_first=self.heldout_first.loss if self.heldout_first else None,
            heldout_loss=self.heldout_last.loss if self.heldout_last else None,
            heldout_metrics=self.heldout_last.metrics if self.heldout_last else {},
            figures=self.recipe.figures,
            timings_hold=held,
            rehearsal=sentence,
            parameters_agree=_agree(checksums),
            peak_bytes=self.peak_bytes,
            lookups={
                name: tuple(held[name] for held in self.lookups.values() if name in held)
                for name in dict.fromkeys(n for held in self.lookups.values() for n in held)
            },
        )
        self._attempt("report.json", lambda path: write(path, outcome.as_json()))
        if not self._quiet:
            print(self._text(outcome), file=sys.stderr)
        return outcome

    def _report(self, plan: Plan) -> RunReport | None:
        """Of the steps under the last plan; of all of them where none of those is whole."""
        evaluation = None
        if self.heldout_last is not None:
            evaluation = Evaluation(heldout_loss=self.heldout_last.loss, references=self.recipe.figures)
        newest = [r for r in self._records if r.step >= self.since]
        if not any(r.samples == plan.global_batch and not r.skipped for r in newest):
            newest = self._records
        report = report_by_prediction(newest, plan, evaluation=evaluation)
        if report is None:
            return None
        notes = report.notes
        if self.since and newest is not self._records:
            left_out = counted(self.since, "step")
            notes = (
                f"not in the figures: {left_out} before step {self.since}, when the plan changed",
                *notes,
            )
        losses = [r.loss for r in self._records if r.loss is not None]
        return msgspec.structs.replace(report, loss_first=losses[0] if losses else None, notes=notes)

    def _text(self, outcome: Outcome) -> str:
        lines = [*outcome.decisions[self._at_start or 0 :]]
        if outcome.report:
            lines.append(report_text(outcome.report, outcome.plan))
        else:
            changed = (
                f" that is in force since step {self.since}, when devices or shares changed,"
                if self.since
                else ""
            )
            lines.append(f"no efficiency is told: the plan{changed} does not predict what devices do alone")
        lines += _memory(outcome)
        seconds = sum(r.step_s for r in self._records)
        lines += lookup_lines([(n, told) for n, all_ in outcome.lookups.items() for told in all_], seconds)
        if outcome.heldout_loss is not None:
            told = {"loss": outcome.heldout_loss} | outcome.heldout_metrics
            lines.append("held-out: " + ", ".join(f"{name} {value:.4f}" for name, value in told.items()))
        if outcome.rehearsal:
            lines.append(f"rehearsal: {outcome.rehearsal}")
        if not outcome.parameters_agree:
            lines.append("WARNING: the devices ended with different parameters")
        lines.append(f"files: {self.folder}")
        return "\n".join(lines)


def _memory(outcome: Outcome) -> list[str]:
    """Predicted peaks beside measured ones, of the devices whose allocator counts."""
    predicted = outcome.plan.prediction.memory_bytes if outcome.plan.prediction else {}
    by_allocator = {
        n: f.value for n, f in outcome.peak_bytes.items() if f.note == ALLOCATED and n in predicted
    }
    return [
        f"memory of {name}: {held / 2**20:.4g} MiB at its peak, {predicted[name] / 2**20:.4g} MiB predicted "
        f"({predicted[name] / held - 1:+.1%})"
        for name, held in by_allocator.items()
    ]


def _agree(checksums: list[dict[str, str]]) -> bool:
    """Whether every parameter is the same, bit for bit, on all devices that hold it."""
    seen: dict[str, str] = {}
    return all(seen.setdefault(name, one) == one for held in checksums for name, one in held.items())
