"""The figures at the top of the page, each with its unit and its source."""

from collections.abc import Iterator

from evener.core.plan import Plan
from evener.core.words import counted
from evener.report.lookups import WHERE, ids_per_s, lookups_of
from evener.report.page.document import Progress, Stat
from evener.report.page.files import RunFiles
from evener.report.results import RunReport
from evener.report.tables import duration, percent

RECENT_STEPS = 20


def headline_stats(run: RunFiles, report: RunReport | None) -> tuple[Stat, ...]:
    """Those of the finished or running job; without a report only what the records alone tell."""
    stats = [*_of_report(report, run.plan)] if report else [*_of_records(run)]
    return (*stats, *_losses(run), *_lookups(run))


def progress(run: RunFiles) -> Progress:
    """Steps done and seconds left, by the mean of the last steps."""
    total = run.info.total_steps if run.info else None
    done = run.records[-1].step + 1 if run.records else 0
    recent = run.records[-RECENT_STEPS:]
    left = None
    if total is not None and recent and not run.ending:
        left = max(0, total - done) * sum(r.step_s for r in recent) / len(recent)
    return Progress(done=done, total=total, left_s=left)


def _of_report(report: RunReport, plan: Plan) -> Iterator[Stat]:
    sources = ", ".join(
        dict.fromkeys(d.solo_samples_per_s.source for d in report.devices if d.solo_samples_per_s)
    )
    yield Stat(
        key="efficiency",
        label="Efficiency",
        text=f"{report.efficiency:.3f}",
        source=f"samples/s over the sum of the devices alone, {report.ideal_samples_per_s:.4g} ({sources})",
        note=""
        if report.efficiency == report.efficiency_used
        else f"{report.efficiency_used:.3f} of the used devices",
        value=report.efficiency,
    )
    steps = counted(report.steps_used, "step")
    yield Stat(
        key="samples_per_s",
        label="Throughput",
        text=f"{report.samples_per_s:.4g}",
        unit="samples/s",
        source=f"measured, {steps} of {counted(report.global_batch, 'sample')}",
        note=_against_best(report),
        value=report.samples_per_s,
    )
    yield _seconds_stat(
        "step_s", "Step", report.step_s, f"measured, median of {steps} ± {percent(report.spread)}"
    )
    if plan.prediction is not None and report.predicted_step_s is not None:
        told = plan.prediction
        inside = "inside" if told.lower_s <= report.step_s <= told.upper_s else "outside"
        yield _seconds_stat(
            "predicted_step_s",
            "Predicted step",
            told.step_s,
            f"{told.source}, {percent(told.step_s / report.step_s - 1, sign=True)} of measured",
            f"measured is {inside} {duration(told.lower_s)} to {duration(told.upper_s)}",
        )
    yield _seconds_stat(
        "gap_s",
        "Lost a step",
        report.gap_s,
        f"step less {duration(report.ideal_step_s)}, the floor",
        f"{percent(report.gap_s / report.step_s)} of the step",
    )


def _against_best(report: RunReport) -> str:
    rates = {d.name: d.solo_samples_per_s.value for d in report.devices if d.solo_samples_per_s}
    best = max(rates, key=lambda name: rates[name])
    return f"{report.samples_per_s / rates[best]:.3g} × {best} alone"


def _of_records(run: RunFiles) -> Iterator[Stat]:
    recent = run.records[-RECENT_STEPS:]
    if recent:
        step_s = sum(r.step_s for r in recent) / len(recent)
        told = f"measured, mean of the last {counted(len(recent), 'step')}"
        rate = sum(r.samples for r in recent if not r.skipped) / sum(r.step_s for r in recent)
        yield Stat(
            key="samples_per_s",
            label="Throughput",
            text=f"{rate:.4g}",
            unit="samples/s",
            source=told,
            value=rate,
        )
        yield _seconds_stat("step_s", "Step", step_s, told)
    if run.plan.prediction is not None:
        p = run.plan.prediction
        yield _seconds_stat(
            "predicted_step_s",
            "Predicted step",
            p.step_s,
            p.source,
            f"between {duration(p.lower_s)} and {duration(p.upper_s)}",
        )


def _losses(run: RunFiles) -> Iterator[Stat]:
    losses = [r for r in run.records if r.loss is not None]
    if losses:
        first, last = losses[0], losses[-1]
        assert first.loss is not None and last.loss is not None
        yield Stat(
            key="loss",
            label="Training loss",
            text=f"{last.loss:.4f}",
            source=f"measured, step {last.step}",
            note=f"{first.loss:.4f} in step {first.step}",
            value=last.loss,
        )
    if run.ending and run.ending.heldout_loss is not None:
        before = run.ending.heldout_first
        yield Stat(
            key="heldout_loss",
            label="Held-out loss",
            text=f"{run.ending.heldout_loss:.4f}",
            source="measured after the last step",
            note="" if before is None else f"{before:.4f} before the first",
            value=run.ending.heldout_loss,
        )


def _lookups(run: RunFiles) -> Iterator[Stat]:
    recent = run.records[-RECENT_STEPS:]
    tables = lookups_of(recent)
    if not tables:
        return
    device = next(iter(tables.values())).device
    told = f"measured on {device}, last {counted(len(recent), 'step')}"
    rate = ids_per_s(tables.values(), sum(r.step_s for r in recent))
    yield Stat(
        key="lookups_per_s", label="Lookups", text=f"{rate:.4g}", unit="ids/s", source=told, value=rate
    )
    for name, seen in tables.items():
        for memory, part in seen.hit_rates.items():
            yield Stat(
                key=f"found_{memory}_{name}",
                label=f"{name}: rows {WHERE[memory]}",
                text=f"{100 * part:.1f}",
                unit="%",
                source=told,
                value=part,
            )


def _seconds_stat(key: str, label: str, value: float, source: str, note: str = "") -> Stat:
    text, unit = duration(value).split(" ")
    return Stat(key=key, label=label, text=text, unit=unit, source=source, note=note, value=value)
