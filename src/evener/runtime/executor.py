"""Runs one device's row of the schedule, step after step. The state of a step in flight is in `step.py`.

    data parallel   0F0 0B0 0F1 0B1 … 0REDUCE_GRAD STEP
    pipeline        1RECV_F0 1F0 1SEND_F0 … 1RECV_B0 1B0 1SEND_B0 … 1REDUCE_GRAD STEP

Every device ends a step with the same verdict, and every holder of a parameter with the same value.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from evener.core.actions import Action
from evener.core.buckets import BUCKET_BYTES
from evener.core.routes import Piece
from evener.core.seams import Channel, Driver, Wire
from evener.core.trace import Span
from evener.runtime.agreement import Verdict
from evener.runtime.parts import Part
from evener.runtime.problem import Problem
from evener.runtime.ranks import Ranks
from evener.runtime.reducers import Reducers, reducers_of_one_model
from evener.runtime.scaling import LossScale
from evener.runtime.step import Step, forward_only
from evener.runtime.tally import Share, Tally, Totals

TRACED_ACTIONS = 4096  # the newest ones; older ones are in the records as seconds by cause


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How steps are taken: the part of a job's wishes that the executor needs."""

    max_norm: float | None = None
    on_non_finite: Literal["stop", "skip"] = "stop"
    loss_scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What this device holds of the model, and how it reaches the others."""

    parts: dict[int, Part]
    reducers: Reducers
    wire: Wire
    channel: Channel | None = None


class Portions(Protocol):
    """Who takes which samples of each micro-batch; `core.routes.Routes` of the plan is one."""

    def num_micro_batches(self, stage: int) -> int: ...

    def samples(self, stage: int, device: str, micro_batch: int) -> int: ...

    def forward_pieces(self, stage: int, micro_batch: int) -> tuple[Piece, ...]: ...

    def backward_pieces(self, stage: int, micro_batch: int) -> tuple[Piece, ...]: ...


@dataclass(frozen=True)
class Alone:
    """The portions of a device that runs the whole model on micro-batches of `sizes` samples."""

    sizes: tuple[int, ...]

    def num_micro_batches(self, stage: int) -> int:
        return len(self.sizes)

    def samples(self, stage: int, device: str, micro_batch: int) -> int:
        return self.sizes[micro_batch] if micro_batch < len(self.sizes) else 0

    def forward_pieces(self, stage: int, micro_batch: int) -> tuple[Piece, ...]:
        return ()

    def backward_pieces(self, stage: int, micro_batch: int) -> tuple[Piece, ...]:
        return ()


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
        self.holding, self.optimizer, self.problem, self.settings = holding, optimizer, problem, settings
        self.ranks, self.driver = ranks, driver
        self.tally = Tally(ranks, holding.wire, problem.metrics)
        self.loss_scale = LossScale(settings.loss_scale) if settings.loss_scale else None
        self.spans: deque[Span] = deque(maxlen=TRACED_ACTIONS)
        self._seconds_before: dict[str, float] = {}
        self._began: float | None = None

    def pause(self) -> None:
        """The next step's time begins when it is called, not when the last one ended."""
        self._began = None

    def step(
        self,
        number: int,
        row: tuple[Action, ...],
        portions: Portions,
        fetch: Callable[[int, int], Any],
        total_samples: int,
    ) -> StepResult:
        """Take step `number` over `total_samples` samples; this device does the actions of `row`."""
        start = self.driver.now() if self._began is None else self._began
        run = Step(self, number, portions, fetch, total_samples)
        run.start_s, run.share.seconds_before = start, self._seconds_before
        for action in row:
            run.do(action)
        run.let_go()
        end = self.driver.now()
        assert run.totals is not None and run.verdict is not None, "a row ends with STEP"
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

    def evaluate(
        self,
        row: tuple[Action, ...],
        portions: Portions,
        fetch: Callable[[int, int], Any],
        total_samples: int,
    ) -> Totals:
        """Loss and metrics over `total_samples` samples, without gradients; models are put in eval mode."""
        modules = [part.module for part in self.holding.parts.values()]
        modes = [m.training for m in modules]
        for module in modules:
            module.eval()
        run = Step(self, -1, portions, fetch, total_samples)
        with torch.no_grad():
            for action in forward_only(row):
                run.do(action)
        run.let_go()
        totals = run.agree()
        for module, mode in zip(modules, modes, strict=True):
            module.train(mode)
        self.pause()
        return totals

    def gather_seconds(self, number: int) -> dict[str, dict[str, float]]:
        """Every device's seconds by cause of the step just done; called by all devices together."""
        totals = self.tally.launch(number, Share(seconds_before=self._seconds_before)).wait()
        self.pause()
        return totals.seconds_before

    def close(self) -> None:
        """Let go of the model's parameters, of every reduction on its way and of the channel."""
        self.holding.reducers.close()
        if self.holding.channel:
            self.holding.channel.close()


def whole_model(
    model: nn.Module,
    problem: Problem,
    ranks: Ranks,
    wire: Wire,
    *,
    stage: int = 0,
    device: torch.device | None = None,
    autocast: torch.dtype | None = None,
    recompute: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> Holding:
    """The holding of data parallelism: the whole model as stage `stage`, its gradients summed over all."""
    part = Part(
        stage=stage,
        module=model,
        problem=problem,
        device=device or torch.device("cpu"),
        autocast=autocast,
        recompute=recompute,
    )
    reducers = reducers_of_one_model(model, ranks, wire, stage, bucket_bytes)
    return Holding(parts={stage: part}, reducers=reducers, wire=wire)
