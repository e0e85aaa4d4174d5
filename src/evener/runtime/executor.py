"""Runs one device's row of the schedule, step after step.

    fetch → 0F0 → 0B0 → fetch → 0F1 → 0B1 → … → 0REDUCE_GRAD → STEP
                                     └ buckets leave while the last backward runs

Every device ends a step with the same gradients, the same verdict and therefore the same parameters.
"""

import math
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from evener.core.actions import Action
from evener.core.seams import Driver, Wire
from evener.core.trace import Cause, Span
from evener.errors import DataError, EvenerError, ModelError, PlanMismatchError
from evener.runtime.agreement import Verdict, judge
from evener.runtime.buckets import GradientBuckets
from evener.runtime.problem import Problem, shapes_of, to_device
from evener.runtime.ranks import Ranks
from evener.runtime.tally import HEALTHY, NON_FINITE, OUT_OF_MEMORY, Share, Tally, Totals

TRACED_ACTIONS = 4096  # the newest ones; older ones are in the records as seconds by cause


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How steps are taken: the part of a job's wishes that the executor needs."""

    max_norm: float | None = None
    on_non_finite: Literal["stop", "skip"] = "stop"
    autocast: torch.dtype | None = None
    loss_scale: float | None = None
    metric_names: tuple[str, ...] = ()


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

    `fetch()` gives the next micro-batch on the host; `learning_rate` is read from the optimiser and checked
    to be the same on all devices. Raises ModelError, DataError or PeerLostError naming the device.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        problem: Problem,
        ranks: Ranks,
        hardware: tuple[torch.device, Driver, Wire],
        settings: Settings,
    ) -> None:
        self.model, self.optimizer, self.problem, self.settings = model, optimizer, problem, settings
        self._ranks = ranks
        self._device, self._driver, wire = hardware
        self.buckets = GradientBuckets(list(model.parameters()), ranks, wire)
        self._tally = Tally(ranks, wire, settings.metric_names)
        self._scaler = (
            torch.amp.GradScaler(self._device.type, init_scale=settings.loss_scale)
            if settings.loss_scale
            else None
        )
        self.spans: deque[Span] = deque(maxlen=TRACED_ACTIONS)
        if self._scaler:
            # It makes its scale with the first loss, and a device without samples never has one.
            self._scaler.scale(torch.zeros((), device=self._device))
        self._seconds_before: dict[str, float] = {}
        self._began: float | None = None

    def pause(self) -> None:
        """The next step's time begins when it is called, not when the last one ended."""
        self._began = None

    def step(
        self,
        number: int,
        row: tuple[Action, ...],
        sizes: tuple[int, ...],
        fetch: Callable[[], Any],
        total_samples: int,
    ) -> StepResult:
        """Take one step over `total_samples`, of which this device runs micro-batches of `sizes` samples."""
        run = _Step(self, number, sizes, total_samples)
        start = self._driver.now() if self._began is None else self._began
        run.start_s = start
        for action in row:
            if action.micro_batch is None or action.micro_batch < len(sizes):
                run.do(action, fetch)
        end = self._driver.now()
        assert run.totals is not None and run.verdict is not None, "a row ends with REDUCE_GRAD and STEP"
        self._began, self._seconds_before = end, run.seconds
        return StepResult(
            number=number,
            samples=total_samples,
            step_s=end - start,
            totals=run.totals,
            verdict=run.verdict,
            gradient_norm=run.gradient_norm,
            seconds=run.seconds,
        )

    def gather_seconds(self, number: int) -> dict[str, dict[str, float]]:
        """Every device's seconds by cause of the step just done; called by all devices together."""
        totals = self._tally.launch(number, Share(seconds_before=self._seconds_before)).wait()
        self.pause()
        return totals.seconds_before

    def close(self) -> None:
        """Let go of the model's parameters and of every reduction on its way."""
        self.buckets.close()


class _Step:
    """The state of one step while its actions run."""

    def __init__(self, executor: Executor, number: int, sizes: tuple[int, ...], total: int) -> None:
        self.ex, self.number, self.sizes, self.total = executor, number, sizes, total
        self.driver, self.device = executor._driver, executor._device
        self.start_s = 0.0
        self.seconds: dict[str, float] = {}
        self.losses: list[tuple[torch.Tensor, float]] = []
        self.share = Share(learning_rate=executor.optimizer.param_groups[0]["lr"])
        self.forwarded: dict[int, tuple[torch.Tensor, float, tuple]] = {}
        self.totals: Totals | None = None
        self.verdict: Verdict | None = None
        self.gradient_norm: float | None = None

    def do(self, action: Action, fetch: Callable[[], Any]) -> None:
        if action.type == "F":
            self._forward(action, self._fetch(fetch))
        elif action.type == "B":
            self._backward(action)
        elif action.type == "REDUCE_GRAD":
            self._reduce()
        elif action.type == "STEP":
            before = self.driver.now()
            self.driver.run("STEP", self._apply, signature=(self.verdict and self.verdict.do,))
            self._spent("STEP", "optimizer", before)
        else:
            raise PlanMismatchError(
                f"{self.ex._ranks.here} cannot run the action {action}",
                remedy="a plan whose pipelines have one stage each",
            )

    def _spent(self, action: str, cause: Cause, since: float, until: float | None = None) -> None:
        end = self.driver.now() if until is None else until
        self.seconds[cause] = self.seconds.get(cause, 0.0) + end - since
        self.ex.spans.append(
            Span(
                device=self.ex._ranks.here,
                action=action,
                start_s=since,
                end_s=end,
                cause=cause,
                step=self.number,
            )
        )

    def _fetch(self, fetch: Callable[[], Any]) -> Any:
        before = self.driver.now()
        try:
            batch = self.driver.run("INPUT", fetch)
        except EvenerError:
            raise
        except Exception as e:
            raise DataError(
                f"reading a batch on {self.ex._ranks.here} failed: {_last_line(e)}",
                numbers=f"step {self.number}",
                remedy="try dataset[i] for the samples of that step in a plain loop",
            ) from e
        self._spent("INPUT", "input", before)
        return batch

    def _forward(self, action: Action, batch: Any) -> None:
        problem, size = self.ex.problem, self.sizes[action.micro_batch or 0]
        weight = problem.weight_of(batch, size)
        self.share.weight += weight
        if self.share.health != HEALTHY or weight == 0:
            return  # nothing counts in this micro-batch, and a mean over nothing would be NaN
        shapes = shapes_of(batch)

        def work() -> tuple[torch.Tensor, dict]:
            cast = self.ex.settings.autocast
            context = torch.autocast(self.device.type, dtype=cast) if cast else nullcontext()
            with context:
                return problem.forward(self.ex.model, to_device(batch, self.device))

        result = self._guarded(str(action), work, shapes, "forward")
        if result is None:
            return
        loss, metrics = result
        for name, (total, count) in metrics.items():
            before = self.share.metrics.get(name, (0.0, 0.0))
            self.share.metrics[name] = (before[0] + float(total), before[1] + float(count))
        mean = problem.reduction == "mean"
        self.losses.append((loss.detach(), weight if mean else 1.0))
        scale = weight if mean else 1.0
        self.forwarded[action.micro_batch or 0] = (loss, scale, shapes)

    def _backward(self, action: Action) -> None:
        last = action.micro_batch == len(self.sizes) - 1
        held = self.forwarded.pop(action.micro_batch or 0, None)
        if held is None or self.share.health != HEALTHY:
            return
        loss, scale, shapes = held
        known = 1.0 / self.total if self.ex.problem.weight is None else 1.0
        self.ex.buckets.begin(scale * known)
        if last:
            self.ex.buckets.arm(self.number)
        scaler = self.ex._scaler

        def work() -> bool:
            (scaler.scale(loss) if scaler else loss).backward()
            return True

        self._guarded(str(action), work, (*shapes, last), "backward")

    def _guarded(self, action: str, work: Callable[[], Any], signature: tuple, phase: str) -> Any:
        """The result of `work`, or None after running out of memory, which is a vote and no crash."""
        before = self.driver.now()
        try:
            result = self.driver.run(action, work, signature=signature)
        except EvenerError:
            raise
        except Exception as e:
            if not is_out_of_memory(e):
                raise ModelError(
                    f"the model failed in {phase} on {self.ex._ranks.here}: {_last_line(e)}",
                    numbers=f"step {self.number}, action {action}, batch shapes {signature}",
                    remedy="run the same batch through the model in a plain loop",
                ) from e
            self.share.health = OUT_OF_MEMORY
            self.forwarded.clear()
            result = None
        self._spent(action, "compute", before)
        return result

    def _reduce(self) -> None:
        buckets, here = self.ex.buckets, self.ex._ranks.here
        values = torch.stack([loss * w for loss, w in self.losses]).sum() if self.losses else None
        self.share.loss_sum = float(values) if values is not None else 0.0
        if not math.isfinite(self.share.loss_sum) and self.share.health == HEALTHY:
            # The sum itself must stay a number, so that the others' losses can still be read.
            self.share.loss_sum, self.share.health = 0.0, NON_FINITE
        launched = self.driver.now()
        self.share.computed_s = launched - self.start_s
        self.share.seconds_before = self.ex._seconds_before
        buckets.launch_rest(self.number)
        underway = self.ex._tally.launch(self.number, self.share)
        buckets.wait()
        self.totals = underway.wait()
        done = self.driver.now()
        longest = max(self.totals.computed_s.values())
        waited = min(longest - self.totals.computed_s[here], done - launched)
        self._spent("0REDUCE_GRAD", "wait", launched, launched + waited)
        self._spent("0REDUCE_GRAD", "reduce", launched + waited, done)
        self.verdict = judge(
            self.totals.health,
            on_non_finite=self.ex.settings.on_non_finite,
            weight=self.totals.weight,
        )

    def _apply(self) -> None:
        ex, buckets = self.ex, self.ex.buckets
        assert self.verdict is not None and self.totals is not None
        if self.verdict.do != "apply":
            buckets.discard()
            return
        buckets.finish(1.0 if ex.problem.weight is None else self.totals.weight)
        if ex._scaler:
            ex._scaler.unscale_(ex.optimizer)
        if ex.settings.max_norm is not None:
            norm = buckets.norm()
            self.gradient_norm = float(norm)
            if self.gradient_norm > ex.settings.max_norm:
                buckets.multiply(ex.settings.max_norm / (self.gradient_norm + 1e-6))
        if ex._scaler:
            ex._scaler.step(ex.optimizer)
            ex._scaler.update()
        else:
            ex.optimizer.step()
        buckets.discard()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that a device's memory is full; the CPU's allocator only raises RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _last_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[-1] if text else 'no message'}"
