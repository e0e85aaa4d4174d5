"""The typical step of a run: many step records in, one step out whose causes add up to it."""

from collections.abc import Sequence
from statistics import median

from evener.core.figures import Value, quartiles
from evener.core.records import StepRecord
from evener.core.trace import CAUSES
from evener.core.words import counted
from evener.errors import UsageError


class TypicalStep(Value, frozen=True, kw_only=True):
    """One step that stands for a run: `step_s` is the median, and every device's causes sum to it."""

    step_s: float
    spread: float
    seconds: dict[str, dict[str, float]]
    steps: int
    steps_used: int
    steps_skipped: int
    warmup_steps: int
    loss_first: float | None
    loss_last: float | None
    notes: tuple[str, ...] = ()


def typical_step(
    records: Sequence[StepRecord], *, global_batch: int, warmup_steps: int, every: int = 1
) -> TypicalStep:
    """The typical step of `records`, without the first `warmup_steps`, skipped steps and odd-sized batches.

    `step_s` is the median of the step times. Medians of parts do not add up to the median of the whole, so
    the seconds by cause are means over the middle half of the steps (by step time), times
    median ÷ mean of that half; what a device's causes leave of a step is overhead.
    Example: steps of 1.0, 1.1, 1.2 and 9.0 s have the median 1.15 and the middle half 1.1, 1.2: factor 1.
    Where only each `every`-th step has an exchange, a step is the mean of so many from one to the next.
    When fewer steps ran, the warm-up is cut so that one step remains, and `notes` say so.
    Raises UsageError when no committed step of `global_batch` samples is left.
    """
    notes = []
    whole = [r for r in records if not r.skipped and r.samples == global_batch]
    if not whole:
        skipped_for = next((r.skipped for r in records if r.skipped), "")
        raise UsageError(
            "no step to report: none was committed with the whole global batch",
            numbers=f"{counted(len(records), 'step')} ran, global batch {global_batch}",
            remedy=f"what skipped them has to go: {skipped_for}" if skipped_for else "a run of more steps",
        )
    skipped = sum(1 for r in records if r.skipped)
    if skipped:
        notes.append(f"{skipped} of {len(records)} steps were skipped and are not in the figures")
    odd = len(records) - skipped - len(whole)
    if odd:
        size = counted(global_batch, "sample")
        notes.append(f"{counted(odd, 'step')} had another size than {size}: not in the figures")
    first = records[0].step + warmup_steps
    used = [r for r in whole if r.step >= first]
    if not used:
        used = whole[-1:]
        notes.append(
            f"only {counted(len(records), 'step')} ran, so the figures come from the last one, warm-up or not"
        )
    num_used, first_used = len(used), used[0].step
    if every > 1:
        used = _rounds(used, every)
        notes.append(f"a step is the mean of up to {every}, from one exchange between hosts to the next")
    step_s = median(r.step_s for r in used)
    middle = sorted(used, key=lambda r: r.step_s)[len(used) // 4 : len(used) - len(used) // 4]
    losses = [r.loss for r in records if r.loss is not None]
    seconds = _seconds(middle, step_s)
    notes += _remarks(middle, seconds, step_s)
    return TypicalStep(
        step_s=step_s,
        spread=_spread([r.step_s for r in used]),
        seconds=seconds,
        steps=len(records),
        steps_used=num_used,
        steps_skipped=skipped,
        warmup_steps=sum(1 for r in records if r.step < min(first, first_used)),
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        notes=tuple(notes),
    )


def _rounds(used: Sequence[StepRecord], every: int) -> list[StepRecord]:
    """The mean step of each whole round; of all steps where no round is whole. Example: 4 to 7, 8 to 11."""
    rows: dict[int, list[StepRecord]] = {}
    for record in used:
        rows.setdefault(record.step // every, []).append(record)
    whole = [row for row in rows.values() if len(row) == every] or [list(used)]
    return [_mean(row) for row in whole]


def _mean(row: Sequence[StepRecord]) -> StepRecord:
    seconds: dict[str, dict[str, float]] = {}
    for record in row:
        for device, by_cause in record.seconds.items():
            held = seconds.setdefault(device, {})
            for cause, s in by_cause.items():
                held[cause] = held.get(cause, 0.0) + s / len(row)
    step_s = sum(r.step_s for r in row) / len(row)
    return StepRecord(step=row[0].step, samples=row[0].samples, step_s=step_s, seconds=seconds)


def _seconds(middle: Sequence[StepRecord], step_s: float) -> dict[str, dict[str, float]]:
    """Seconds by device and cause over `middle`, scaled so that each device's causes sum to `step_s`."""
    scale = step_s / sum(r.step_s for r in middle)
    result: dict[str, dict[str, float]] = {}
    for device in dict.fromkeys(name for r in middle for name in r.seconds):
        by_cause: dict[str, float] = {
            cause: scale * sum(r.seconds.get(device, {}).get(cause, 0.0) for r in middle) for cause in CAUSES
        }
        by_cause["overhead"] = step_s - sum(s for cause, s in by_cause.items() if cause != "overhead")
        result[device] = by_cause
    return result


def _remarks(middle: Sequence[StepRecord], seconds: dict[str, dict[str, float]], step_s: float) -> list[str]:
    """What a reader must know: devices with gaps in their records, or with more seconds than the step has."""
    remarks = []
    for device, by_cause in seconds.items():
        missing = sum(1 for r in middle if device not in r.seconds)
        if missing:
            remarks.append(
                f"{device} has no seconds in {missing} of {len(middle)} steps: they count as overhead"
            )
        if by_cause["overhead"] < -0.01 * step_s:
            remarks.append(
                f"the causes of {device} take {-by_cause['overhead']:.4g} s more than the step of "
                f"{step_s:.4g} s: its overhead is negative and its figures are in doubt"
            )
    return remarks


def _spread(step_seconds: Sequence[float]) -> float:
    """Half the distance between the quartiles over the median; 0 for a single step."""
    lower, middle, upper = quartiles(step_seconds)
    return (upper - lower) / 2 / middle
