"""A training case, run on several devices and in a plain loop. How the devices are driven is known only here.

`run_steps(pool, case)` gives what every device saw; `plain(case)` what one device would have seen.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from evener.core.actions import parse_action
from evener.core.buckets import BUCKET_BYTES
from evener.core.seams import Driver
from evener.runtime.executor import Executor, StepResult
from evener.runtime.hardware import HardwareDriver
from evener.runtime.holding import Alone, Settings, whole_model
from evener.runtime.problem import Problem, default_inputs
from evener.runtime.ranks import Ranks
from evener.runtime.wire import GroupWire
from tests.local.pool import Pool
from tests.reference import Gradients, PlainRun, plain_loop

IGNORE = -100
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong on device number `device`, in the first micro-batch of its first try at `step`."""

    device: int
    step: int
    kind: Literal["memory in forward", "memory in backward", "infinite gradient", "NaN loss"]


def sgd_with_momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Case:
    """`micro_batches[d]` are the sizes device d runs, in order; together they are the global batch.

    `masked` are positions in each global batch whose label is the ignore index; then the loss is divided
    by the valid labels. `several_buckets` sends one gradient at a time.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    steps: int = 3
    dtype: torch.dtype = torch.float32
    reduction: Literal["mean", "sum"] = "mean"
    masked: tuple[int, ...] = ()
    loss_factor: float = 1.0
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd_with_momentum
    max_norm: float | None = None
    loss_scale: float | None = None
    on_non_finite: Literal["stop", "skip"] = "stop"
    fault: Fault | None = None
    several_buckets: bool = True

    @property
    def global_batch(self) -> int:
        return sum(map(sum, self.micro_batches))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss_factor * cross_entropy(output, target, ignore_index=IGNORE, reduction=self.reduction)


@dataclass
class Try:
    """One try at a step as a device saw it; `gradients` are absent where the optimiser did not move."""

    step: int
    do: str
    reason: str
    loss: float
    norm: float | None
    gradients: Gradients | None
    checksum: float


@dataclass
class DeviceRun:
    tries: list[Try] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)

    @property
    def applied(self) -> list[Try]:
        return [t for t in self.tries if t.gradients is not None]


def base_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Linear(5,7)-Tanh-Linear(7,3) with weights from seed 0."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def global_batches(case: Case) -> list[Batch]:
    """The batch of every step: samples and labels from a generator with seed 1."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(case.steps):
        x = torch.randn(case.global_batch, 5, generator=generator)
        y = torch.randint(0, 3, (case.global_batch,), generator=generator)
        y[list(case.masked)] = IGNORE
        batches.append((x.to(case.dtype), y))
    return batches


def valid(batch: Batch) -> torch.Tensor:
    return (batch[1] != IGNORE).sum()


def plain(case: Case, without: tuple[int, ...] = ()) -> PlainRun:
    """The same steps but those in `without` in a plain loop on one device, a whole global batch at a time."""
    model = base_model(case.dtype)

    def mean_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        loss = case.loss(model(batch[0]), batch[1])
        return loss / valid(batch) if case.reduction == "sum" else loss

    batches = [b for step, b in enumerate(global_batches(case)) if step not in without]
    return plain_loop(model, case.optimizer(model.parameters()), batches, mean_loss, case.max_norm)


def run_steps(pool: Pool, case: Case) -> list[DeviceRun]:
    """The steps of `case` with one process per device; what each device saw, in their order."""
    return pool.run(train_on, len(case.micro_batches), case)


def train_on(rank: int, world_size: int, case: Case) -> DeviceRun:
    """One device's part of `run_steps`."""
    device = Device(rank, world_size, case)
    run = DeviceRun()
    batches = global_batches(case)
    sizes, step = list(case.micro_batches), 0
    while step < case.steps:
        seen: list[Gradients] = []
        device.recorder = seen.append
        result = device.step(step, sizes, batches[step])
        run.tries.append(attempt_of(result, seen, device.model))
        if result.verdict.do == "shrink":
            sizes = [halved(s) if f"test/{d}" in result.verdict.devices else s for d, s in enumerate(sizes)]
        else:
            step += 1
    run.parameters = [p.detach().clone() for p in device.model.parameters()]
    device.executor.close()
    return run


class Device:
    """A device of the test with its executor, in the process of its rank."""

    def __init__(
        self, rank: int, world_size: int, case: Case, stage: int = 0, driver: Driver | None = None
    ) -> None:
        self.rank, self.case = rank, case
        self.model = base_model(case.dtype)
        self.recorder: Callable[[Gradients], None] = lambda gradients: None
        self._faulty = case.fault is not None and case.fault.device == rank
        self._step = -1
        self.model.register_forward_hook(self._break)
        optimizer = case.optimizer(self.model.parameters())
        optimizer.register_step_pre_hook(lambda *_: self.recorder(_gradients(self.model)))
        ranks = Ranks(tuple(f"test/{d}" for d in range(world_size)), f"test/{rank}")
        cpu = torch.device("cpu")
        problem = Problem(
            loss=case.loss,
            inputs=default_inputs,
            reduction=case.reduction,
            weight=valid if case.masked else None,
        )
        settings = Settings(
            max_norm=case.max_norm, loss_scale=case.loss_scale, on_non_finite=case.on_non_finite
        )
        holding = whole_model(
            self.model,
            problem,
            ranks,
            GroupWire(),
            stage=stage,
            bucket_bytes=1 if case.several_buckets else BUCKET_BYTES,
        )
        self.executor = Executor(holding, optimizer, problem, ranks, driver or HardwareDriver(cpu), settings)

    def step(self, number: int, sizes: list[tuple[int, ...]], batch: Batch) -> StepResult:
        """Take step `number` over the global batch `batch`, cut into `sizes` by device."""
        self._step = number
        first = sum(map(sum, sizes[: self.rank]))
        mine = sizes[self.rank]
        edges = [first + sum(mine[:i]) for i in range(len(mine) + 1)]
        cut = iter([tuple(t[a:b] for t in batch) for a, b in itertools.pairwise(edges)])
        words = [f"0{kind}{m}" for m in range(len(mine)) for kind in "FB"] + ["0REDUCE_GRAD", "STEP"]
        row = tuple(parse_action(word) for word in words)
        return self.executor.step(number, row, Alone(mine), lambda *_: next(cut), len(batch[0]))

    def _break(self, model: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        fault = self.case.fault
        if fault is None or not self._faulty or self._step != fault.step:
            return output
        self._faulty = False
        if fault.kind == "memory in forward":
            raise torch.OutOfMemoryError("scripted")
        if fault.kind == "memory in backward":
            model[2].weight.register_hook(_no_memory_once())
        if fault.kind == "infinite gradient":
            output.register_hook(lambda gradient: gradient * float("inf"))
        return output * float("nan") if fault.kind == "NaN loss" else output


def halved(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Every micro-batch in two. Example: (4, 1) gives (2, 2, 1)."""
    return tuple(part for n in sizes for part in (n - n // 2, n // 2) if part)


def _no_memory_once() -> Callable[[torch.Tensor], None]:
    left = ["scripted"]

    def hook(gradient: torch.Tensor) -> None:
        if left:
            raise torch.OutOfMemoryError(left.pop())

    return hook


def _gradients(model: nn.Module) -> Gradients:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def attempt_of(result: StepResult, seen: list[Gradients], model: nn.Module) -> Try:
    assert len(seen) <= 1, "the optimiser moved twice in one step"
    return Try(
        step=result.number,
        do=result.verdict.do,
        reason=result.verdict.reason,
        loss=result.totals.loss,
        norm=result.gradient_norm,
        gradients=seen[0] if seen else None,
        checksum=sum(float(p.detach().double().sum()) for p in model.parameters()),
    )
