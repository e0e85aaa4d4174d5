"""Runs one device's row of the schedule, step after step.

A step in flight is in `step.py`, how it ends in `ending.py`.

    data parallel   0F0 0B0 0F1 0B1 … 0REDUCE_GRAD STEP
    pipeline        1RECV_F0 1F0 1SEND_F0 … 1RECV_B0 1B0 1SEND_B0 … 1REDUCE_GRAD STEP

Every device ends a step with the same verdict, and every holder of a parameter with the same value.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evener.core.actions import Action, forward_only
from evener.core.membership import Ballot
from evener.core.ranges import joined
from evener.core.seams import Driver
from evener.core.trace import Cause, Span
from evener.runtime.agreement import Verdict
from evener.runtime.batchnorm import statistics_of
from evener.runtime.holding import Bench, Holding, Portions, Routed, Settings
from evener.runtime.kept import Kept, RangeOf
from evener.runtime.problem import Problem
from evener.runtime.ranks import Ranks
from evener.runtime.scaling import LossScale
from evener.runtime.scope import ScopeOf, no_scope
from evener.runtime.step import Step
from evener.runtime.tally import HEALTHY, Share, Tally, Totals
from evener.runtime.tidying import Tidier


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did, the same on every device but for `seconds`, which are this device's own."""

    number: int
    samples: int
    step_s: float
    totals: Totals
    verdict: Verdict
    gradient_norm: float | None
    seconds: dict[str, float]


class Executor:
    """Drives one device through the steps of a job.

    `fetch(stage, micro_batch)` gives this device's samples of a micro-batch, on the host. Raises ModelError,
    DataError or PeerLostError naming the device.
    """

    def __init__(
        self,
        holding: Holding,
        optimizer: torch.optim.Optimizer,
        problem: Problem,
        ranks: Ranks,
        driver: Driver,
        settings: Settings,
    ) -> None:
        self.holding, self.driver = holding, driver
        everyone = self._everyone = Tally(ranks, holding.quick or holding.wire, problem.metrics)
        self.bench = Bench(
            holding=holding,
            optimizer=optimizer,
            problem=problem,
            ranks=ranks,
            driver=driver,
            settings=settings,
            tally=Tally(ranks, holding.circle.wire, problem.metrics) if holding.circle else everyone,
            loss_scale=LossScale(settings.loss_scale) if settings.loss_scale else None,
            routed=Routed(ranks.here),
        )
        self._statistics = [b for part in holding.parts.values() for b in statistics_of(part.module)]
        self._statistics_before: list[torch.Tensor] = []
        self._seconds_before: dict[str, float] = {}
        self._began: float | None = None
        self._run: Step | None = None
        self._ballot: Ballot | None = None
        devices = [part.device for part in holding.parts.values()] or [torch.device("cpu")]
        self._tidier = Tidier(devices[0], driver)

    @property
    def spans(self) -> tuple[Span, ...]:
        """What this device did last, action by action."""
        return self.bench.spans

    @property
    def tidied(self) -> str:
        """What was done between steps about memory that is reserved and unused; "" for nothing."""
        return self._tidier.told()

    def pause(self) -> None:
        """The next step's time begins when it is called, not when the last one ended."""
        self._began = None

    def step(
        self,
        number: int,
        row: Iterable[Action],
        portions: Portions,
        fetch: Callable[[int, int], Any],
        total_samples: int,
        scope_of: ScopeOf = no_scope,
        notice: int = 0,
        own_samples: int | None = None,
        kept: Kept | None = None,
    ) -> StepResult:
        """Take step `number` over `total_samples` samples; this device does the actions of `row`.

        `scope_of(stage, micro_batch)` says what masks and statistics of a micro-batch depend on. `notice` is
        told to all devices. `own_samples` are those of this device's circle. With `kept` the step begins with
        what this device has of it already. An error leaves the step in flight, to be completed or dropped.
        """
        start = self.driver.now() if self._began is None else self._began
        tidied = self._tidier.between_steps()
        if tidied:
            self.bench.traced.append(("TIDY", *tidied, "overhead", number))
        self._statistics_before = [b.clone() for b in self._statistics]
        run = self._run = Step(self.bench, number, portions, fetch, total_samples, scope_of)
        run.ending.divisor = total_samples if own_samples is None else own_samples
        run.start_s, run.share.seconds_before, run.share.notice = start, self._seconds_before, notice
        if kept:
            self._take_up(run, kept)
        for action in row:
            run.do(action)
        run.let_go()
        return self._concluded(run)

    @property
    def ballot(self) -> Ballot | None:
        """What all agreed on in the newest step that this device concluded."""
        return self._ballot

    @property
    def awaits_ballot(self) -> int | None:
        """The step in flight whose gradients are summed while its outcome is not known here."""
        return self._run.number if self._run and self._run.is_summed else None

    @property
    def in_flight(self) -> bool:
        """Whether a step was begun that is neither concluded nor dropped."""
        return self._run is not None

    def read(self, values: Sequence[float]) -> Totals:
        """The totals in the sum of several circles' tallies."""
        return self._everyone.read(values)

    def add_seconds(self, cause: Cause, seconds: float) -> None:
        """The step just done took so much longer, after its end."""
        self._seconds_before[cause] = self._seconds_before.get(cause, 0.0) + seconds
        self._began = self.driver.now()

    def complete(self, ballot: Ballot) -> StepResult:
        """Conclude the step in flight as the others did, without asking anybody."""
        run = self._run
        assert run is not None and run.is_summed and run.number == ballot.step
        run.ending.conclude(self.bench.tally.read(ballot.tally), ballot.square_norm)
        return self._concluded(run)

    def keep(self, range_of: RangeOf) -> tuple[Kept | None, str]:
        """What this device has of the step in flight, to go on with it among others; or None and why not.

        The reason is empty where no step is in flight.
        """
        run, here = self._run, self.bench.ranks.here
        if run is None:
            return None, ""
        if run.share.health != HEALTHY:
            return None, f"what {here} has would not count: it ran out of memory, or its loss is not finite"
        if not run.is_computed or run.ending.totals is not None:
            return None, f"{here} was in the middle of a sample"
        gradients = self.holding.reducers.own_sums()
        if gradients is None:
            return None, f"{here} has no gradients of its own any more: they were in sums with others'"
        ranges = [*(run.kept.ranges if run.kept else ()), *(range_of(*key) for key in run.ran)]
        found = Kept(
            number=run.number,
            ranges=joined(ranges),
            gradients=gradients,
            share=run.share,
            statistics=tuple(b.clone() for b in self._statistics),
        )
        return found, ""

    def _take_up(self, run: Step, kept: Kept) -> None:
        """Begin `run` with what is `kept` of it."""
        assert kept.number == run.number, "gradients of another step"
        run.kept = kept
        self.holding.reducers.put(kept.gradients)
        kept.gradients.clear()  # they lie in the buckets now: once is enough
        run.share.samples, run.share.weight = kept.share.samples, kept.share.weight
        run.share.metrics = dict(kept.share.metrics)
        for buffer, after in zip(self._statistics, kept.statistics, strict=True):
            buffer.copy_(after)

    def drop(self) -> None:
        """Forget the step in flight: its gradients, and what it did to statistics."""
        if self._run is not None:
            self._run = None
            self._restore_statistics()
        self.holding.reducers.discard()
        self.pause()

    def _concluded(self, run: Step) -> StepResult:
        ending = run.ending
        assert ending.totals is not None and ending.verdict is not None, "a row ends with STEP"
        self._run, self._ballot = None, ending.ballot
        if ending.verdict.do != "apply":  # a step counts in full or not at all
            self._restore_statistics()
        end = self.driver.now()
        self._began, self._seconds_before = end, run.seconds
        return StepResult(
            number=run.number,
            samples=run.total,
            step_s=end - run.start_s,
            totals=ending.totals,
            verdict=ending.verdict,
            gradient_norm=ending.gradient_norm,
            seconds=run.seconds,
        )

    def _restore_statistics(self) -> None:
        for buffer, before in zip(self._statistics, self._statistics_before, strict=True):
            buffer.copy_(before)

    def evaluate(
        self,
        row: tuple[Action, ...],
        portions: Portions,
        fetch: Callable[[int, int], Any],
        total_samples: int,
    ) -> Totals:
        """Loss and metrics over `total_samples` samples, without gradients; models are put in eval mode."""
        modes = [(m, m.training) for part in self.holding.parts.values() for m in part.module.modules()]
        for module, _ in modes:
            module.training = False
        try:
            run = Step(self.bench, -1, portions, fetch, total_samples)
            with torch.no_grad():
                for action in forward_only(row):
                    run.do(action)
            run.let_go()
            totals = run.agree(self._everyone)
        finally:  # also where a device is lost meanwhile: the next generation trains
            for module, mode in modes:
                module.training = mode
        self.pause()
        return totals

    def gather_seconds(self, number: int) -> dict[str, dict[str, float]]:
        """Every device's seconds by cause of the step just done; called by all devices together."""
        totals = self._everyone.launch(number, Share(seconds_before=self._seconds_before)).wait()
        self.pause()
        return totals.seconds_before

    def close(self) -> None:
        """See `let_go`."""
        let_go(self.holding)


def let_go(holding: Holding) -> None:
    """The model's parameters and layers are the user's own again; nothing is on its way to another device."""
    holding.reducers.close()
    if holding.owned:
        holding.owned.close()
    for part in holding.parts.values():
        if part.residing:
            part.residing.close()
    if holding.channel:
        holding.channel.close()
