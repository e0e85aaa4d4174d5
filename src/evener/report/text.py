"""The end of a run as text: what each device did, how that compares, and where the lost time went."""

from rich.table import Table

from evener.core.plan import Plan
from evener.core.trace import CAUSES
from evener.core.words import counted
from evener.report.compare import compare
from evener.report.results import LOSS_CAUSES, RunReport
from evener.report.tables import amount, duration, percent, render, sourced, table, unit_for

LOSS_NAMES = {
    "left_out": "left out",
    "compute": "slower compute",
    "wait": "slower share",
    "transfer": "transfer",
    "bubble": "bubble",
    "reduce": "exposed reduction",
    "optimizer": "optimizer",
    "input": "input",
    "overhead": "overhead",
}


def report_text(report: RunReport, plan: Plan) -> str:
    """`report` as text for a person; reasons, notes and the plan's sentences appear verbatim."""
    sections = [
        _summary(report, plan),
        _devices(report),
        _lost(report),
        _predicted(report, plan),
        _left_out(report),
        _loss(report),
        _sentences("Not exact", plan.inexact),
        _sentences("Notes", report.notes),
    ]
    return "\n".join(section for section in sections if section)


def _summary(report: RunReport, plan: Plan) -> str:
    used = [d for d in report.devices if d.seconds]
    rates = [d for d in report.devices if d.solo_samples_per_s is not None]
    sources = ", ".join(dict.fromkeys(d.solo_samples_per_s.source for d in rates if d.solo_samples_per_s))
    best = max(rates, key=lambda d: d.solo_samples_per_s.value if d.solo_samples_per_s else 0.0)
    assert best.solo_samples_per_s is not None
    times = report.samples_per_s / best.solo_samples_per_s.value
    ideal = f"{report.ideal_samples_per_s:.4g} samples/s"
    rows = [
        (
            "efficiency",
            f"{report.efficiency:.3f}",
            f"samples/s over the sum of solo rates of all {len(report.devices)} offered devices, "
            f"{ideal} ({sources})",
        ),
        ("efficiency, used", f"{report.efficiency_used:.3f}", f"the same over the {len(used)} used devices"),
        ("samples/s", f"{report.samples_per_s:.4g}", "measured"),
        ("step", duration(report.step_s), f"measured, median, ± {percent(report.spread)}"),
        *_prediction_row(report, plan),
        (
            "floor",
            duration(report.ideal_step_s),
            f"{counted(report.global_batch, 'sample')} at {ideal}; the step is "
            f"{percent(report.step_s / report.ideal_step_s - 1)} above it",
        ),
        (
            "best single device",
            f"{times:.3g} x",
            f"as fast as {best.name} alone, {best.solo_samples_per_s.value:.4g} samples/s "
            f"({sourced(best.solo_samples_per_s)}){'' if times >= 1 else ': alone it would be faster'}",
        ),
    ]
    if len(report.devices) == 1:
        rows.pop()  # a device compared with itself
    head = (
        f"{counted(report.steps, 'step')} of {counted(report.global_batch, 'sample')}; "
        f"figures from {report.steps_used} of them, without {report.warmup_steps} of warm-up"
    )
    return render(head, table(("", "", ""), rows, left=3))


def _prediction_row(report: RunReport, plan: Plan) -> list[tuple[str, str, str]]:
    told = plan.prediction
    if told is None:
        return [("predicted step", "none", "this plan carries no prediction")]
    inside = "inside" if told.lower_s <= report.step_s <= told.upper_s else "outside"
    error = percent(told.step_s / report.step_s - 1, sign=True)
    bounds = f"{duration(told.lower_s)} to {duration(told.upper_s)}"
    return [
        (
            "predicted step",
            duration(told.step_s),
            f"{told.source}, {error} of measured, which is {inside} {bounds}",
        )
    ]


def _devices(report: RunReport) -> str:
    """What each used device did with the step."""
    factor, unit = unit_for(report.step_s)
    used = [d for d in report.devices if d.seconds]
    causes = [c for c in CAUSES if any(round(d.seconds[c] * factor, 2) for d in used)]
    rows = []
    for d in used:
        solo = d.solo_samples_per_s
        row = [d.name, f"{d.samples_per_step:g}", percent(d.samples_per_step / report.global_batch)]
        row += [percent(d.busy), f"{solo.value:.4g}" if solo else "none", sourced(solo) if solo else ""]
        rows.append(row + [amount(d.seconds[c], factor) for c in causes])
    header = ("device", "samples", "part", "busy", "alone/s", "from", *causes)
    return render(f"What each device did ({unit} a step, measured)", table(header, rows))


def _lost(report: RunReport) -> str:
    """Lost time by device and cause; the last row is the whole job's, and its causes add up to the gap."""
    factor, unit = unit_for(report.step_s)
    known = [d.lost_s for d in report.devices if d.solo_samples_per_s]
    causes = [c for c in LOSS_CAUSES if any(round(lost[c] * factor, 2) for lost in known)]
    rows = [
        [d.name, *(amount(d.lost_s[c], factor) for c in causes), amount(sum(d.lost_s.values()), factor)]
        for d in report.devices
        if d.solo_samples_per_s
    ]
    total = sum(report.lost_s.values())
    rows.append(
        ["all, by solo rate", *(amount(report.lost_s[c], factor) for c in causes), amount(total, factor)]
    )
    header = ("device", *(LOSS_NAMES[c] for c in causes), "lost")
    return render(
        f"Where the time went ({unit} a step beyond what the same samples take alone)",
        table(header, rows),
        f"lost {duration(total)} = step {duration(report.step_s)} - floor {duration(report.ideal_step_s)}",
    )


def _predicted(report: RunReport, plan: Plan) -> str:
    """Predicted beside measured by device and cause, where the plan predicts that much."""
    told = plan.prediction
    if told is None or not told.seconds:
        return ""
    factor, unit = unit_for(report.step_s)
    comparison = compare(told.seconds, {d.name: d.seconds for d in report.devices if d.seconds})
    rows = [
        [
            d.device,
            d.cause,
            amount(d.predicted_s, factor),
            amount(d.measured_s, factor),
            amount(d.difference_s, factor),
            "" if d.error is None else percent(d.error, sign=True),
        ]
        for d in comparison.differences
        if max(d.predicted_s, abs(d.measured_s)) * factor >= 0.005
    ]
    parts: list[str | Table] = [
        f"Predicted beside measured ({unit} a step; predicted: {told.source})",
        table(("device", "cause", "predicted", "measured", "difference", "error"), rows, left=2),
    ]
    if comparison.only_measured:
        parts.append(f"not predicted by device: {', '.join(comparison.only_measured)}")
    if comparison.only_predicted:
        parts.append(f"predicted but not measured: {', '.join(comparison.only_predicted)}")
    return render(*parts)


def _left_out(report: RunReport) -> str:
    return _sentences("Left out", tuple(f"{d.name}: {d.left_out}" for d in report.devices if d.left_out))


def _loss(report: RunReport) -> str:
    rows = []
    if report.loss_first is not None and report.loss_last is not None:
        rows.append(("training, first to last", f"{report.loss_first:.4f} to {report.loss_last:.4f}"))
    if report.evaluation is not None:
        unit = f" {report.evaluation.unit}" if report.evaluation.unit else ""
        rows.append(("held-out", f"{report.evaluation.heldout_loss:.4f}{unit}"))
        rows += [(name, f"{value:.4f}") for name, value in report.evaluation.references.items()]
    return render("Loss", table(("", ""), rows, left=2)) if rows else ""


def _sentences(title: str, sentences: tuple[str, ...]) -> str:
    return render(title, *(f"  {sentence}" for sentence in sentences)) if sentences else ""
