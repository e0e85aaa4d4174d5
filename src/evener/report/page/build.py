"""From the files of a run to the document of its page."""

from collections.abc import Callable
from typing import TypeVar

from evener.core.words import counted
from evener.errors import EvenerError
from evener.report.page.cells import short
from evener.report.page.curves import LIVE_POINTS, MOST_POINTS, curves
from evener.report.page.document import Document, Timeline
from evener.report.page.files import RunFiles
from evener.report.page.losses import beside, lost, report_of
from evener.report.page.picture import plan_picture
from evener.report.page.price import cost
from evener.report.page.said import decisions
from evener.report.page.stats import headline_stats, progress
from evener.report.page.timeline import timeline
from evener.report.plans import plan_text
from evener.report.text import report_text

T = TypeVar("T")


def document(
    run: RunFiles, *, live: bool = False, timeline_of: Callable[[RunFiles], Timeline | None] = timeline
) -> Document:
    """What the page of `run` shows. `live` says that the run may still be going on; `timeline_of` may then
    remember what it made.

    A part that cannot be made of the files (they are damaged, or not of one run) is left out, with a note.
    """
    notes = list(run.problems)
    report = tried("the accounting", lambda: report_of(run), notes)
    priced, cost_note = tried("the cost", lambda: cost(run, report), notes) or (None, "")
    plan = run.plan
    done = progress(run)
    return Document(
        name=short(run.name, 200),
        headline=f"{counted(done.done, 'step')} of {counted(plan.global_batch, 'sample')} on "
        f"{counted(len(plan.devices), 'device')}",
        badges=_badges(run, live=live),
        progress=done,
        stats=tried("the figures", lambda: headline_stats(run, report), notes) or (),
        plan=plan_picture(run),
        timeline=tried("the timeline", lambda: timeline_of(run), notes),
        lost=tried("the lost time", lambda: lost(report) if report else None, notes),
        beside=tried("the comparison", lambda: beside(report, plan) if report else None, notes),
        curves=curves(run, LIVE_POINTS if live and not run.ending else MOST_POINTS),
        said=decisions(run, report),
        cost=priced,
        cost_note=short(cost_note),
        text=tried("the text", lambda: _text(run), notes) or "",
        notes=tuple(map(short, notes)),
    )


def tried(what: str, make: Callable[[], T], notes: list[str]) -> T | None:
    """What `make` gives; None and a note where the files do not allow it."""
    try:
        return make()
    except EvenerError as e:
        notes.append(f"{what} cannot be told: {e.what}")
    except (ArithmeticError, ValueError, KeyError, AssertionError) as e:
        notes.append(f"{what} cannot be told: the files do not belong together ({type(e).__name__} {e})")
    return None


def _badges(run: RunFiles, *, live: bool) -> tuple[tuple[str, str], ...]:
    """(kind, text): kinds are good, bad and plain."""
    badges = []
    if run.ending:
        badges.append(("good", "finished"))
    else:
        badges.append(("plain", "running") if live else ("bad", "no report.json: it runs, or ended early"))
    if run.ending and run.ending.rehearsal:
        held = run.ending.timings_hold
        badges.append(("plain" if held else "bad", f"rehearsal, timings {'hold' if held else 'are void'}"))
    elif run.info and run.info.rehearse:
        badges.append(("plain", "rehearsal"))
    if run.ending and not run.ending.parameters_agree:
        badges.append(("bad", "devices ended with different parameters"))
    if run.plan.inexact:
        badges.append(("plain", f"not exact in {counted(len(run.plan.inexact), 'point')}"))
    return tuple(badges)


def _text(run: RunFiles) -> str:
    report = run.ending.report if run.ending else None
    return plan_text(run.plan) + (f"\n{report_text(report, run.plan)}" if report else "")
