"""Loss and step time over the steps, thinned to a number of points that a page can hold."""

from collections.abc import Sequence

from evener.core.records import StepRecord
from evener.report.page.document import Curves
from evener.report.page.files import RunFiles

MOST_POINTS = 4000
LIVE_POINTS = 800  # they are sent anew with every look: 30 kB instead of 150


def curves(run: RunFiles, most: int = MOST_POINTS) -> Curves:
    """The run's curves in at most `most` points, with held-out losses and reference numbers as lines."""
    lines: list[tuple[str, float]] = []
    if run.ending:
        if run.ending.heldout_loss is not None:
            lines.append(("held-out, after", run.ending.heldout_loss))
        lines += (run.ending.figures or {}).items()
    told = run.plan.prediction
    step, loss, step_s, every = thinned(run.records, most)
    return Curves(
        step=step,
        loss=loss,
        step_s=step_s,
        every=every,
        references=tuple((name.replace("_", " ")[:80], value) for name, value in lines[:8]),
        predicted_s=(told.lower_s, told.step_s, told.upper_s) if told else None,
    )


def thinned(
    records: Sequence[StepRecord], most: int = MOST_POINTS
) -> tuple[tuple[int, ...], tuple[float | None, ...], tuple[float, ...], int]:
    """(steps, losses, seconds, steps a point): means over so many records that at most `most` are left.

    Example: losses 4, 3, 2 with at most 2 points: (1, 2), (3.5, 2), seconds alike, 2 steps a point.
    """
    every = max(1, -(-len(records) // most))
    groups = [records[i : i + every] for i in range(0, len(records), every)]
    return (
        tuple(g[-1].step for g in groups),
        tuple(_mean([r.loss for r in g if r.loss is not None]) for g in groups),
        tuple(sum(r.step_s for r in g) / len(g) for g in groups),
        every,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
