"""Where a run's time goes, as sentences and a table: from a profiled step, the trace, or its records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from evener.core.records import StepRecord
from evener.core.trace import CAUSES, Cause, Trace
from evener.core.words import counted
from evener.errors import UsageError
from evener.report.page.files import RunFiles
from evener.report.page.folder import Folder
from evener.report.page.losses import report_of
from evener.report.profiled import Use, left_out_note, read_profiled, use
from evener.report.results import RunReport
from evener.report.tables import duration, percent, render, table
from evener.report.text import LOSS_NAMES

TRAVEL: tuple[Cause, ...] = ("reduce", "transfer", "wait")
"""Causes of a trace that are communication: messages, reductions, and the wait for whom they come from."""

INSIDE, BETWEEN = "REDUCE_GRAD inside groups", "REDUCE_GRAD between groups"
"""How a measured trace names the two parts of a sum over groups that nothing hid."""

_WAITS = "waits count as communication; for kernels and operators: evener train --profile-step N"


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Use and communication of each device in a step, what cost most, and where the figures are from."""

    run: str
    source: str
    uses: tuple[Use, ...]
    sentences: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """For a person."""
        rows = [
            (u.device, duration(u.step_s), *map(percent, (u.busy, u.communication, u.exposed)))
            for u in self.uses
        ]
        parts = [
            render(
                f"{self.run}: parts of a step, {self.source}",
                table(("device", "step", "computing", "communication", "not hidden"), rows),
            ),
            render(*self.sentences) if self.sentences else "",
            self._operators(),
            render(*(f"note: {n}" for n in self.notes)) if self.notes else "",
        ]
        return "\n".join(p for p in parts if p)

    def as_json(self) -> dict[str, Any]:
        """For a program; its keys are promised."""
        return {
            "run": self.run,
            "source": self.source,
            "devices": [msgspec.to_builtins(u) for u in self.uses],
            "sentences": list(self.sentences),
            "notes": list(self.notes),
        }

    def _operators(self) -> str:
        rows = [
            (u.device, name, duration(s), percent(s / u.step_s), f"{times} x")
            for u in self.uses
            for name, s, times in u.operators[:3]
        ]
        header = ("device", "operator", "of its own", "of the step", "called")
        return render("What computes most (profiled)", table(header, rows, left=2)) if rows else ""


def explanation(path: str | Path, run: RunFiles) -> Explanation:
    """The explanation of the run in the folder at `path`, read as `run`.

    Raises FileError for a profile that cannot be read, UsageError where there is no step at all.
    """
    raw = Folder(path).read("profiled-step.json")
    notes = list(run.problems)
    if raw is not None:
        profiles = read_profiled(raw)
        uses = tuple(use(p) for p in profiles)
        notes += [left_out_note(p) for p in profiles if p.left_out]
        if run.ending and run.ending.rehearsal:
            notes.append("a rehearsal: these are this machine's seconds, a paced action waits in between")
        source = f"profiled by torch in step {profiles[0].step}" if profiles else "profiled by torch"
    elif run.traces:
        uses = traced(run.traces[0])
        steps = len({s.step for s in run.traces[0].spans if s.step >= 0})
        source = f"mean of {counted(steps, 'step')} of trace.json, {run.traces[0].source}"
        notes.append(_WAITS)
    elif uses := recorded(run.records):
        paced = "rehearsed" if run.info and run.info.rehearse else "measured"
        source = f"mean of {counted(len(run.records), 'step')} of metrics.jsonl, {paced}"
        notes.append(_WAITS)
        if not any("trace.json" in problem for problem in run.problems):
            notes.append("the run has no trace.json: it goes on, was stopped, or failed")
    else:
        raise UsageError(
            f"{run.name} holds no step: neither profiled-step.json, trace.json nor a record in metrics.jsonl",
            remedy="a run that has taken a step; evener train --profile-step N for kernels and operators",
        )
    report = report_of(run)
    return Explanation(
        run=run.name,
        source=source,
        uses=uses,
        sentences=(
            *_busiest(uses),
            *(exposed_by_group(run.traces[0]) if run.traces else ()),
            *(_lost(report) if report else ()),
        ),
        notes=tuple(notes),
    )


def traced(trace: Trace) -> tuple[Use, ...]:
    """Use and communication by the causes of a trace's steps, held-out evaluation left out.

    Example: a step of 1 s with 0.9 s of compute, 0.04 of reduce and 0.06 of wait is busy 0.9, and 0.1 is
    communication, none of it hidden: what is hidden has no span.
    """
    taken = msgspec.structs.replace(trace, spans=tuple(s for s in trace.spans if s.step >= 0))
    steps: dict[str, set[int]] = {}
    for s in taken.spans:
        steps.setdefault(s.device, set()).add(s.step)
    seconds = {device: taken.seconds_by_cause(device) for device in steps}
    return tuple(
        _use_of(device, seconds[device], sum(seconds[device].values()), len(numbers))
        for device, numbers in steps.items()
        if sum(seconds[device].values()) > 0
    )


def recorded(records: Sequence[StepRecord]) -> tuple[Use, ...]:
    """The same from what a run wrote down after each step, for one that left no trace.

    Example: steps of 1 s and 3 s, of which a device computed 0.9 and 2.7: 2 s a step, busy 0.9.
    """
    held: dict[str, list[StepRecord]] = {}
    for r in records:
        for device in r.seconds:
            held.setdefault(device, []).append(r)
    uses = []
    for device, steps in held.items():
        seconds: dict[str, float] = {c: sum(r.seconds[device].get(c, 0.0) for r in steps) for c in CAUSES}
        uses.append(_use_of(device, seconds, sum(r.step_s for r in steps), len(steps)))
    return tuple(uses)


def _use_of(device: str, seconds: Mapping[str, float], whole_s: float, steps: int) -> Use:
    """The use of `device` in `steps` steps of together `whole_s` seconds."""
    travel = sum(seconds[c] for c in TRAVEL) / whole_s
    return Use(
        device=device,
        step_s=whole_s / steps,
        busy=(seconds["compute"] + seconds["optimizer"]) / whole_s,
        communication=travel,
        exposed=travel,
        operators=(),
    )


def exposed_by_group(trace: Trace) -> tuple[str, ...]:
    """What of the sums nothing hid, inside groups of devices and between them; nothing where all is one ring.

    Of the device that waited longest between groups, a step. Example: "sums not hidden on a/0: 310 ms a
    step between groups, 4 ms inside them".
    """
    seconds: dict[str, dict[str, float]] = {}
    steps = max(1, len({s.step for s in trace.spans if s.step >= 0}))
    for s in trace.spans:
        if s.step >= 0 and s.action in (INSIDE, BETWEEN):
            by_action = seconds.setdefault(s.device, {INSIDE: 0.0, BETWEEN: 0.0})
            by_action[s.action] += (s.end_s - s.start_s) / steps
    if not seconds:
        return ()
    device = max(seconds, key=lambda d: seconds[d][BETWEEN])
    between, inside = duration(seconds[device][BETWEEN]), duration(seconds[device][INSIDE])
    return (f"sums not hidden on {device}: {between} a step between groups, {inside} inside them",)


def _busiest(uses: Sequence[Use]) -> list[str]:
    if len(uses) < 2:
        return []
    most, least = max(uses, key=lambda u: u.busy), min(uses, key=lambda u: u.busy)
    talker = max(uses, key=lambda u: u.exposed)
    said = [
        f"computing most: {most.device}, {percent(most.busy)}; least: {least.device}, {percent(least.busy)}"
    ]
    if talker.exposed > 0:
        said.append(f"communication holds up {talker.device} most: {percent(talker.exposed)} of the step")
    return said


def _lost(report: RunReport) -> list[str]:
    causes = sorted(report.lost_s.items(), key=lambda x: -x[1])
    told = [f"{LOSS_NAMES[c]} {duration(s)}" for c, s in causes[:3] if s > 0]
    whole = f"{duration(report.gap_s)} of {duration(report.step_s)}"
    return [f"lost in a typical step: {whole}" + (f", most to {', '.join(told)}" if told else "")]
