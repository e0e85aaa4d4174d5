"""Seconds and bytes of the whole model on one kind, at any micro-batch size inside what was measured."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

import numpy as np

from evener.core.figures import Figure
from evener.core.profile import Profile, StepTiming
from evener.cost.layers import edge, layer_cost
from evener.cost.memory import model_bytes, stage_memory
from evener.errors import OutOfRangeError, UnknownNameError

MODEL_ERROR = 0.02
"""Part of a predicted time that bounds add on both sides for what the formula leaves out (assumed)."""


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Seconds per micro-batch by its size in samples; index 0 is "no samples" and costs nothing.

    Between measured sizes straight lines; below the smallest its seconds and bytes hold; no entry above the
    largest that fitted. A size never costs less than a smaller one: where the measurement says so, the
    smaller one's seconds are used. Example: forward 1 ms at size 2 and 3 ms at size 4 give 2 ms at size 3.
    """

    kind: str
    forward_s: np.ndarray
    backward_s: np.ndarray
    input_s: np.ndarray
    peak_bytes: np.ndarray
    update_s: float
    overhead_s: float
    measured_sizes: tuple[int, ...]
    rows_s: np.ndarray
    refused_size: int | None = None

    @property
    def largest(self) -> int:
        """The largest micro-batch that was measured and fitted."""
        return len(self.forward_s) - 1

    def largest_within(self, num_bytes: float) -> int:
        """The largest micro-batch whose peak stays within `num_bytes`; 0 when none does."""
        return int(np.searchsorted(self.peak_bytes[1:], num_bytes, side="right"))

    def reach(self, micro_batch: int) -> None:
        """OutOfRangeError when `micro_batch` lies above every measured size without being known not to
        fit.
        """
        if micro_batch > self.largest and (self.refused_size is None or micro_batch < self.refused_size):
            raise OutOfRangeError(
                f"micro-batch {micro_batch} on {self.kind!r} is outside what was measured",
                numbers=f"measured sizes: {', '.join(map(str, self.measured_sizes))}",
                remedy=f"a micro-batch up to {self.largest}, or a profile measured at {micro_batch}",
            )


def step_cost(profile: Profile, kind: str, side: int = 0) -> StepCost:
    """The table of `kind`; `side` -1 or 1 gives its optimistic or pessimistic edge by the figures' spread.

    Uses whole-model steps where there are any, else the sum over layers. UnknownNameError when the profile
    has neither for `kind`; OutOfRangeError when no measured size fitted.
    """
    rows = [s for s in profile.steps if s.kind == kind] or _steps_from_layers(profile, kind)
    if not rows and any(t.kind == kind for t in profile.timings):
        layer_cost(profile, kind)  # says which layer is missing
    if not rows:
        known = ", ".join(profile.kinds) or "none"
        raise UnknownNameError(
            f"the profile of {profile.model!r} has no measurements for kind {kind!r}",
            numbers=f"kinds measured: {known}",
            remedy=f"`evener profile` on a {kind!r}, or a fleet without it",
        )
    refused = min((r.micro_batch for r in rows if not r.fits), default=None)
    fitting = {r.micro_batch: r for r in rows if r.fits and r.forward_s and r.backward_s}
    usable = [fitting[b] for b in sorted(fitting) if refused is None or b < refused]
    if not usable:
        raise OutOfRangeError(
            f"no measured micro-batch fitted on kind {kind!r}",
            numbers=f"sizes tried: {', '.join(str(r.micro_batch) for r in rows)}",
            remedy="a profile with a smaller micro-batch, or a fleet without this kind",
        )

    def table(get: Callable[[StepTiming], Figure | None], at: int = side) -> np.ndarray:
        return _by_size([r.micro_batch for r in usable], [edge(get(r), at) for r in usable])

    return StepCost(
        kind=kind,
        forward_s=table(lambda r: r.forward_s),
        backward_s=table(lambda r: r.backward_s),
        input_s=table(lambda r: r.input_s),
        peak_bytes=table(lambda r: r.peak_bytes, 0),
        update_s=_middle(edge(r.update_s, side) for r in usable if r.update_s),
        overhead_s=_middle(edge(r.step_overhead_s, side) for r in usable if r.step_overhead_s),
        measured_sizes=tuple(sorted(fitting)),
        rows_s=table(lambda r: r.rows_s),
        refused_size=refused,
    )


def _by_size(sizes: list[int], values: list[float]) -> np.ndarray:
    table = np.interp(np.arange(sizes[-1] + 1), sizes, values)
    table[0] = 0.0
    return np.maximum.accumulate(table)


def _middle(values: Iterable[float]) -> float:
    held = list(values)
    return median(held) if held else 0.0


def _steps_from_layers(profile: Profile, kind: str) -> list[StepTiming]:
    """Whole-model rows as sums of the layers' rows, for the sizes at which every layer was measured."""
    rows = [t for t in profile.timings if t.kind == kind and t.tensor_parallel == 1]
    steps = []
    for size in sorted({t.micro_batch for t in rows}):
        here = {t.layer: t for t in rows if t.micro_batch == size}
        if len(here) < len(profile.layers):
            continue
        fits = all(t.fits for t in here.values())
        complete = fits and all(t.forward_s for t in here.values())
        if fits and not complete:
            continue
        held = _held_bytes(profile, size)
        steps.append(
            StepTiming(
                kind=kind,
                micro_batch=size,
                fits=fits,
                forward_s=_total(t.forward_s for t in here.values()) if fits else None,
                backward_s=_total(t.backward_s for t in here.values()) if fits else None,
                update_s=_total(t.update_s for t in here.values()) if fits else None,
                peak_bytes=Figure(value=held, source="fitted") if held else None,
            )
        )
    return steps


def _held_bytes(profile: Profile, size: int) -> float:
    """Peak of one device that holds the whole chain, one micro-batch at a time."""
    return stage_memory(model_bytes(profile), 0, len(profile.layers), samples=size, in_flight=1).total


def _total(figures: Iterable[Figure | None]) -> Figure | None:
    """The sum of figures; relative spreads are taken to move together, which is the wider bound."""
    held = [f for f in figures if f]
    whole = sum(f.value for f in held)
    if not held:
        return None
    spread = sum(f.value * f.spread for f in held) / whole
    return Figure(value=whole, source="fitted", spread=spread)
