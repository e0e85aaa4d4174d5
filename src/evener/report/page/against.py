"""Two runs side by side: figures, lost time, curves."""

from collections.abc import Sequence

from evener.report.page.build import tried
from evener.report.page.cells import columns, part, seconds, short, unit_for, word
from evener.report.page.curves import curves
from evener.report.page.document import Cell, Comparison, Stat, Table
from evener.report.page.files import RunFiles
from evener.report.page.losses import report_of
from evener.report.page.stats import headline_stats
from evener.report.results import LOSS_CAUSES, RunReport
from evener.report.text import LOSS_NAMES


def comparison(ours: RunFiles, theirs: RunFiles) -> Comparison:
    """What the page shows where `theirs` is laid beside `ours`; notes say what makes them unlike."""
    notes = [f"{theirs.name}: {x}" for x in theirs.problems]
    first = tried("the accounting", lambda: report_of(ours), notes)
    second = tried(f"the accounting of {theirs.name}", lambda: report_of(theirs), notes)
    if ours.plan.global_batch != theirs.plan.global_batch:
        notes.append(
            f"the global batches differ, {ours.plan.global_batch} and {theirs.plan.global_batch} samples: "
            "compare samples/s, not seconds a step"
        )
    names = (short(ours.name, 80), short(theirs.name, 80))
    left = tried("the figures", lambda: headline_stats(ours, first), notes) or ()
    right = tried("the figures", lambda: headline_stats(theirs, second), notes) or ()
    return Comparison(
        name=names[1],
        table=_figures(left, right, names),
        lost=_lost(first, second, names) if first and second else None,
        curves=curves(theirs),
        notes=tuple(map(short, notes)),
    )


def _figures(left: Sequence[Stat], right: Sequence[Stat], names: tuple[str, str]) -> Table:
    by_key = {s.key: s for s in right}
    keys = [s.key for s in left] + [s.key for s in right if s.key not in {x.key for x in left}]
    ours = {s.key: s for s in left}
    rows = []
    for key in keys:
        a, b = ours.get(key), by_key.get(key)
        known = a or b
        assert known is not None
        ratio = b.value / a.value - 1 if a and b and a.value and b.value is not None else None
        rows.append(
            (
                word(known.label),
                _figure(a),
                _figure(b),
                part(ratio, sign=True) if ratio is not None else word("–"),
            )
        )
    header = columns("figure", (names[0], ""), (names[1], ""), ("difference", "of the first"))
    return Table(caption="Figures of both runs", columns=header, rows=tuple(rows))


def _figure(stat: Stat | None) -> Cell:
    return Cell(text="–") if stat is None else Cell(text=f"{stat.text} {stat.unit}".strip(), value=stat.value)


def _lost(first: RunReport, second: RunReport, names: tuple[str, str]) -> Table:
    factor, unit = unit_for(max(first.step_s, second.step_s))
    rows = [
        (
            word(LOSS_NAMES[c]),
            seconds(first.lost_s[c], factor),
            seconds(second.lost_s[c], factor),
            seconds(second.lost_s[c] - first.lost_s[c], factor),
        )
        for c in LOSS_CAUSES
        if round(first.lost_s[c] * factor, 2) or round(second.lost_s[c] * factor, 2)
    ]
    rows.append(
        (
            word("lost"),
            seconds(first.gap_s, factor),
            seconds(second.gap_s, factor),
            seconds(second.gap_s - first.gap_s, factor),
        )
    )
    header = columns(
        "cause",
        (names[0], f"{unit} a step"),
        (names[1], f"{unit} a step"),
        ("difference", f"{unit} a step"),
    )
    return Table(caption="Lost time of both jobs", columns=header, rows=tuple(rows), total=True)
