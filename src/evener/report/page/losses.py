"""Where the time went: the accounting of `report.accounting` as a table, and pairs with the prediction."""

from collections.abc import Iterator, Sequence

from evener.core.plan import Plan
from evener.core.trace import CAUSES
from evener.report.accounting import report_by_prediction
from evener.report.compare import Difference, compare
from evener.report.page.cells import columns, part, seconds, unit_for, word
from evener.report.page.document import Beside, Cell, Lost, Pair, Table
from evener.report.page.files import RunFiles
from evener.report.results import LOSS_CAUSES, RunReport
from evener.report.tables import duration
from evener.report.text import LOSS_NAMES

RECENT_RECORDS = 500


def report_of(run: RunFiles) -> RunReport | None:
    """The run's report; of a run that goes on, or ended early, one over its newest records.

    None where the plan predicts too little to tell what each device does alone, or no whole step was taken.
    """
    if run.ending and run.ending.report:
        return run.ending.report
    whole = [r for r in run.records if not r.skipped and r.samples == run.plan.global_batch and r.seconds]
    return report_by_prediction(run.records[-RECENT_RECORDS:], run.plan) if whole else None


def lost(report: RunReport) -> Lost:
    """Lost seconds by device and cause; the last row is the job's, and its causes add up to the gap."""
    factor, unit = unit_for(report.step_s)
    known = [d for d in report.devices if d.solo_samples_per_s]
    causes = [c for c in LOSS_CAUSES if any(round(d.lost_s[c] * factor, 2) for d in known)]
    rows = [
        (
            word(d.name),
            *(seconds(d.lost_s[c], factor) for c in causes),
            seconds(sum(d.lost_s.values()), factor),
        )
        for d in known
    ]
    total = sum(report.lost_s.values())
    rows.append(
        (
            word("the job"),
            *(seconds(report.lost_s[c], factor) for c in causes),
            seconds(total, factor),
        )
    )
    header = columns(
        "device", *((LOSS_NAMES[c], f"{unit} a step") for c in causes), ("lost", f"{unit} a step")
    )
    return Lost(
        causes=tuple((c, LOSS_NAMES[c]) for c in causes),
        table=Table(
            caption="Seconds of a step beyond what the same samples take alone (measured less solo rate); "
            "the job's row weighs each device by its solo rate",
            columns=header,
            rows=tuple(rows),
            total=True,
        ),
        sentence=f"lost {duration(total)} = step {duration(report.step_s)} − floor "
        f"{duration(report.ideal_step_s)}",
        gap_s=report.gap_s,
    )


def beside(report: RunReport, plan: Plan) -> Beside | None:
    """Predicted beside measured by device and cause; None where the plan predicts no seconds."""
    told = plan.prediction
    if told is None or not told.seconds:
        return None
    factor, unit = unit_for(report.step_s)
    compared = compare(told.seconds, {d.name: d.seconds for d in report.devices if d.seconds})
    shown = [d for d in compared.differences if max(d.predicted_s, abs(d.measured_s)) * factor >= 0.005]
    names = tuple(dict.fromkeys(d.device for d in shown))
    largest = compared.largest
    sentence = "" if largest is None else _largest(largest.device, largest.cause, largest.difference_s)
    for only, what in ((compared.only_measured, "not predicted"), (compared.only_predicted, "not measured")):
        sentence += f"; {what}: {', '.join(only)}" if only else ""
    return Beside(
        pairs=tuple(
            Pair(device=d.device, cause=d.cause, predicted_s=d.predicted_s, measured_s=d.measured_s)
            for d in shown
        ),
        table=Table(
            caption=f"A step by device and cause; predicted: {told.source}, measured: median step",
            columns=columns("device", "", *((c, f"{unit} a step") for c in _causes(shown))),
            rows=tuple(row for name in names for row in _rows(name, shown, factor)),
        ),
        sentence=sentence,
    )


def _causes(shown: Sequence[Difference]) -> list[str]:
    return [c for c in CAUSES if any(d.cause == c for d in shown)]


def _rows(device: str, shown: Sequence[Difference], factor: float) -> Iterator[tuple[Cell, ...]]:
    """Three rows of a device: predicted, measured, and the error of the first."""
    found = {d.cause: d for d in shown if d.device == device}
    causes = _causes(shown)
    yield (
        word(device),
        word("predicted"),
        *(seconds(found[c].predicted_s if c in found else 0.0, factor) for c in causes),
    )
    yield (
        word(""),
        word("measured"),
        *(seconds(found[c].measured_s if c in found else 0.0, factor) for c in causes),
    )
    errors = (found[c].error if c in found else None for c in causes)
    yield word(""), word("error"), *(word("–") if e is None else part(e, sign=True) for e in errors)


def _largest(device: str, cause: str, difference_s: float) -> str:
    way = "too slow" if difference_s > 0 else "too fast"
    return f"furthest off: {cause} on {device}, predicted {duration(abs(difference_s))} {way}"
