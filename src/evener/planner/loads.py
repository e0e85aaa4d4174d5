"""How long one device takes for n samples of a global batch, for every n, and in which micro-batches."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from evener.cost.overlap import Tail
from evener.cost.step import StepCost

_MOST_CELLS = 2_000_000
_ALL_SIZES = 64


@dataclass(frozen=True, kw_only=True)
class Load:
    """Seconds by (candidate micro-batch, samples) of one kind within one memory limit.

    Samples run in micro-batches of one size, the last one smaller. All sizes are tried up to 64, above that
    the measured ones (seconds per sample are monotone between two of them), the largest and about 64 in
    between.
    """

    cost: StepCost
    cap: int
    global_batch: int
    micro_batch: int | None = None

    @cached_property
    def candidates(self) -> np.ndarray:
        if self.micro_batch is not None:
            return np.array([self.micro_batch])
        top = min(self.cap, self.global_batch)
        count = max(2, min(_ALL_SIZES, _MOST_CELLS // (self.global_batch + 1)))
        if top <= count:
            return np.arange(1, top + 1)
        spaced = np.unique(np.linspace(1, top, count).astype(int))
        measured = [b for b in self.cost.measured_sizes if b <= top]
        return np.unique(np.concatenate([spaced, measured])).astype(int)

    @cached_property
    def _cells(self) -> tuple[np.ndarray, np.ndarray]:
        """(busy seconds, samples of the last micro-batch) by candidate and samples."""
        one = self.cost.forward_s + self.cost.backward_s + self.cost.input_s
        n = np.arange(self.global_batch + 1)
        busy = np.full((len(self.candidates), len(n)), np.inf)
        last = np.zeros((len(self.candidates), len(n)), dtype=np.int64)
        for row, size in enumerate(self.candidates):
            fits = len(n) if size <= self.cap else min(len(n), self.cap + 1)
            full, rest = np.divmod(n[:fits], size)
            whole = full * one[size] if size <= self.cap else 0.0
            busy[row, :fits] = whole + one[rest]
            last[row, :fits] = np.where(rest > 0, rest, np.minimum(size, n[:fits]))
        return busy + self.cost.overhead_s + self.cost.update_s + self.cost.rows_s[last], last

    def curve(self, tail: Tail) -> "LoadCurve":
        """Seconds until the step ends as far as this device is concerned, by samples; see `Tail`.

        Non-decreasing in samples: with one sample less in the last micro-batch both its forward and its
        backward are no longer, and the reduction hides behind no more than the backward.
        """
        busy, last = self._cells
        ends = busy + tail.exposed_s(self.cost.backward_s[: self.cap + 1])[last]
        best = ends.argmin(axis=0)
        seconds = np.take_along_axis(ends, best[None], axis=0)[0]
        seconds[0] = 0.0
        return LoadCurve(
            load=self, seconds=np.maximum.accumulate(seconds).tolist(), micro_batches=self.candidates[best]
        )


@dataclass(frozen=True, kw_only=True)
class LoadCurve:
    """`seconds[n]` for n samples and the micro-batch that reaches it."""

    load: Load
    seconds: list[float]
    micro_batches: np.ndarray
