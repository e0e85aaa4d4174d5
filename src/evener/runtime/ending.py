"""How a step ends on one device: a verdict that is the same everywhere, gradients of the mean, and the move.

sums and tally are here ──► verdict ──► divided, others' mixed in ──► norm ──► clipped ──► optimiser
"""

import math
from collections.abc import Callable

import torch

from evener.core.membership import Ballot
from evener.core.trace import Cause
from evener.core.tracebacks import is_out_of_memory, last_line
from evener.errors import EvenerError, ModelError, OutOfMemoryError
from evener.runtime.agreement import Verdict, judge
from evener.runtime.holding import Bench
from evener.runtime.outer.late import Late
from evener.runtime.tally import Totals


class Ending:
    """The end of step `number`, which `spent(action, cause, since)` is told the seconds of.

    A device that is lost may end `conclude` half way; the second call goes on where the first one was.
    """

    def __init__(self, bench: Bench, number: int, spent: Callable[[str, Cause, float], None]) -> None:
        self._bench, self._number, self._spent = bench, number, spent
        self._driver, self._here = bench.driver, bench.ranks.here
        self._on_host = bench.holding.homes.on_host
        self._is_divided = False
        self.divisor = 1.0  # of what gradients begin with: the samples, which are known before the weight is
        self.totals: Totals | None = None
        self.verdict: Verdict | None = None
        self.ballot: Ballot | None = None
        self.gradient_norm: float | None = None

    def conclude(self, totals: Totals, square_norm: float | None) -> None:
        """All devices judge alike, and the optimiser moves or does not.

        `square_norm` of all gradients is given where another device has it and this one could not ask all.
        """
        self.totals = totals
        late = self._late
        scale = self._bench.loss_scale.value if self._bench.loss_scale else 1.0
        weight = totals.weight or (late.arrive() if late else 0.0)
        self.verdict = judge(totals.health, on_non_finite=self._bench.settings.on_non_finite, weight=weight)
        if self.verdict.do == "apply":
            square_norm = self._hand_out(totals, square_norm)
        elif late and self.verdict.do == "skip":
            late.pass_by(torch.tensor(totals.values, dtype=torch.float64))
        self.ballot = Ballot(step=self._number, tally=totals.values, square_norm=square_norm)
        before = self._driver.now()
        self._driver.run("STEP", self._move, signature=(self.verdict.do,))
        self._spent("STEP", "optimizer", before)
        scaled = self._bench.loss_scale.value / scale if self._bench.loss_scale else 1.0
        self._bench.holding.settle(counts=self.verdict.do == "apply", factor=scaled)

    @property
    def _late(self) -> Late | None:
        circle = self._bench.holding.circle
        return circle.late if circle else None

    def _mixed(self, late: Late, totals: Totals) -> bool:
        """Other circles' gradients of the step before come in, and this one's go out; False if not finite."""
        views = self._bench.holding.reducers.sums_of(late.parameters)
        had = [p.grad is not None for p in late.parameters]
        numbers, before = torch.tensor(totals.values, dtype=torch.float64), self._driver.now()
        found = late.mix(views, had, totals.weight, numbers)
        self._spent("REDUCE_GRAD", "reduce", before)
        if found is None:
            return False
        for p, view, has in zip(late.parameters, views, found, strict=True):
            p.grad = view if has else None
        return True

    def _hand_out(self, totals: Totals, square_norm: float | None) -> float | None:
        """Gradients become those of the mean over the global batch; the norm may still say no."""
        bench, reducers = self._bench, self._bench.holding.reducers
        scale = bench.loss_scale.value if bench.loss_scale else 1.0
        if not self._is_divided:
            self._is_divided = True
            counted = bench.problem.weight is not None and totals.weight
            by = scale * totals.weight / self.divisor if counted else scale
            self._on_host(lambda: reducers.finish(by))
        if self._late and not self._mixed(self._late, totals):
            self.verdict = Verdict(bench.settings.on_non_finite, "the summed gradient is NaN or infinite")
            return None
        # A NaN that was compressed comes out of other places as well: such a step must not count.
        if bench.settings.max_norm is None and bench.loss_scale is None and not bench.holding.loses:
            return None
        if square_norm is None:
            square = torch.tensor([self._on_host(reducers.square_norm)], dtype=torch.float64)
            if not reducers.everywhere:
                bench.holding.wire.all_reduce(square, f"step {self._number}, norm").wait()
            square_norm = float(square)
        self.gradient_norm = square_norm**0.5
        finite = math.isfinite(self.gradient_norm)
        if bench.loss_scale:
            bench.loss_scale.update(finite=finite)
            if not finite:
                reason = f"the gradient overflowed float16; the loss scale is now {bench.loss_scale.value:g}"
                self.verdict = Verdict("skip", reason)
        elif not finite:
            self.verdict = Verdict(bench.settings.on_non_finite, "the summed gradient is NaN or infinite")
        return square_norm

    def _move(self) -> None:
        bench, reducers = self._bench, self._bench.holding.reducers
        assert self.verdict is not None
        if self.verdict.do == "apply":
            most = bench.settings.max_norm
            if most is not None and self.gradient_norm is not None and self.gradient_norm > most:
                by = most / (self.gradient_norm + 1e-6)
                self._on_host(lambda: reducers.multiply(by))
            try:
                reducers.hand_over()
                bench.holding.homes.step(bench.optimizer)
            except EvenerError:
                raise  # of a table that moves with it: a full disk, say
            except Exception as e:
                if is_out_of_memory(e):
                    raise OutOfMemoryError(
                        f"{self._here} ran out of memory in the optimiser's step: {last_line(e)}",
                        numbers=f"step {self._number}",
                        remedy="fewer layers on it, or an optimiser with less state or foreach=False",
                    ) from e
                raise ModelError(
                    f"the optimiser failed on {self._here}: {last_line(e)}", numbers=f"step {self._number}"
                ) from e
        reducers.discard()
