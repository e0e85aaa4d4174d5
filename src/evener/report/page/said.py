"""Every decision of a run with its reason, as the files hold it, word for word."""

from collections.abc import Iterator

from evener.core.exchange import said_of
from evener.core.words import counted
from evener.report.page.cells import short
from evener.report.page.document import Said
from evener.report.page.files import RunFiles
from evener.report.results import RunReport

MOST_SAID = 500


def decisions(run: RunFiles, report: RunReport | None) -> tuple[Said, ...]:
    """Those of the plan, then those of the run in their order; at most `MOST_SAID`, the rest counted."""
    every = [*_of_plan(run), *_of_run(run), *_notes(report)]
    if len(every) > MOST_SAID:
        more = f"{len(every) - MOST_SAID} more are in the run's files"
        every = [*every[:MOST_SAID], Said(kind="note", subject="", reason=more, source="report")]
    return tuple(every)


def _said(kind: str, subject: str, reason: str, source: str) -> Said:
    return Said(kind=kind, subject=short(subject, 200), reason=short(reason), source=source)


def _of_plan(run: RunFiles) -> Iterator[Said]:
    plan = run.plan
    if plan.why:
        yield _said("plan", f"{counted(len(plan.devices), 'device')}, {plan.schedule}", plan.why, "plan.json")
    for x in plan.left_out:
        yield _said("left out", x.device, x.reason, "plan.json")
    for r in plan.reductions:
        compression = said_of(r.compression)
        subject = f"{', '.join(r.devices)} over {r.transport}{compression}"
        yield _said("gradients", subject, r.reason or "the plan gives no reason", "plan.json")
    for sentence in plan.inexact:
        yield _said("not exact", "", sentence, "plan.json")


def _of_run(run: RunFiles) -> Iterator[Said]:
    for record in run.records:
        if record.skipped:
            yield _said("skipped", f"step {record.step}", record.skipped, "metrics.jsonl")
    if run.ending is None:
        for sentence in run.decisions:
            yield _said("run", "", sentence, "decisions.jsonl")
        return
    for sentence in run.ending.decisions:
        yield _said("run", "", sentence, "report.json")
    if run.ending.rehearsal:
        yield _said("rehearsal", "", run.ending.rehearsal, "report.json")
    if not run.ending.parameters_agree:
        yield _said("warning", "", "the devices ended with different parameters", "report.json")


def _notes(report: RunReport | None) -> Iterator[Said]:
    for note in report.notes if report else ():
        yield _said("note", "", note, "report")
