"""Steps of a small model whose state is held in parts, on a thread a device, and the same in a plain loop."""

import copy
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo  # what an optimiser loads in its first step, which others would wait for
from torch import nn
from torch.nn.functional import mse_loss

from evener.core.layers import find_layers
from evener.core.plan import Held, Ownership, Pipeline, Plan, Share, Stage
from evener.core.routes import Routes
from evener.core.seams import Post, Wire
from evener.runtime.executor import Executor, StepResult
from evener.runtime.holding import Holding, Settings
from evener.runtime.owning.means import Means
from evener.runtime.owning.owned import Owned
from evener.runtime.parts import Part
from evener.runtime.problem import Problem, default_inputs
from evener.runtime.ranks import Ranks
from evener.schedules import make
from tests.fakes import PostOffice, ScriptedDriver, together
from tests.reference import PlainRun, plain_loop

WIDTH = 6
_SEEDED = threading.RLock()  # threads share the generator


class Tied(nn.Module):
    """Layers of several kinds: tied ends, one that nothing uses, one that is frozen, one of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 10)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(3))
        self.frozen = nn.Linear(10, 10)
        self.frozen.requires_grad_(False)
        self.idle = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(10))
        self.last = nn.Linear(WIDTH, 10, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return torch.nn.functional.linear(self.frozen(x), self.last.weight.t())


def chain(widths: tuple[int, ...] = (WIDTH, 10, 10, 7, WIDTH)) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True, kw_only=True)
class Job:
    """`parts` and `micro_batches` by device; those together are the global batch."""

    parts: tuple[int, ...]
    micro_batches: tuple[tuple[int, int], ...]  # (samples, micro-batch)
    held: Held = "optimizer"
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    dtype: torch.dtype = torch.float32
    steps: int = 3
    max_norm: float | None = None
    loss_scale: float | None = None
    make_model: Callable[[], nn.Module] = chain
    unit_bytes: float = 1  # every layer by itself
    seed: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"lab/{i}" for i in range(len(self.parts)))

    @property
    def samples(self) -> int:
        return sum(n for n, _ in self.micro_batches)

    def model(self) -> nn.Module:
        with _SEEDED:
            torch.manual_seed(self.seed)
            return self.make_model().to(self.dtype)

    def plan(self) -> Plan:
        model = self.model()
        layers = tuple(x.name for x in find_layers(model))
        with_parameters = [
            x.name for x in find_layers(model) if any(True for _ in x.module.parameters(recurse=x.whole))
        ]
        return Plan(
            global_batch=self.samples,
            schedule="1f1b",
            pipelines=tuple(
                Pipeline(
                    samples=samples,
                    micro_batch=size,
                    stages=(Stage(layers=layers, shares=(Share(devices=(name,), samples=size),)),),
                )
                for name, (samples, size) in zip(self.names, self.micro_batches, strict=True)
            ),
            owners=tuple(
                Ownership(layer=x, parts=dict(zip(self.names, self.parts, strict=True)), held=self.held)
                for x in with_parameters
            ),
        )

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return [
            (
                torch.randn(self.samples, WIDTH, generator=generator).to(self.dtype),
                torch.randn(self.samples, WIDTH, generator=generator).to(self.dtype),
            )
            for _ in range(self.steps)
        ]


@dataclass
class Seen:
    """What a device saw: parameters after all, and of each step its result and the whole gradients."""

    parameters: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)


class Device:
    """A device with its executor, in whatever thread or process."""

    def __init__(self, job: Job, here: str, post: Post, wire: Wire, plan: Plan | None = None) -> None:
        self.job, self.here, self.plan = job, here, plan or job.plan()
        with _SEEDED:
            self._open(post, wire)

    def _open(self, post: Post, wire: Wire) -> None:
        job, here = self.job, self.here
        self.model = job.model()
        self.optimizer = job.optimizer([p for p in self.model.parameters() if p.requires_grad])
        ranks = Ranks(self.plan.devices, here)
        driver, cpu = ScriptedDriver(), torch.device("cpu")
        means = Means(ranks=ranks, post=post, wire=wire, device=cpu, now=driver.now)
        self.owned = Owned(self.model, self.optimizer, self.plan, means, unit_bytes=job.unit_bytes)
        problem = Problem(loss=mse_loss, inputs=default_inputs)
        stage = self.plan.devices.index(here)
        part = Part(stage=stage, module=self.model, problem=problem, device=cpu)
        holding = Holding(parts={stage: part}, reducers=self.owned.reducers(), wire=wire, owned=self.owned)
        wishes = Settings(max_norm=job.max_norm, loss_scale=job.loss_scale, on_non_finite="skip")
        self.executor = Executor(holding, self.optimizer, problem, ranks, driver, wishes)

    def step(self, number: int, batch: tuple[torch.Tensor, torch.Tensor]) -> StepResult:
        routes = Routes(self.plan)
        place = self.plan.devices.index(self.here)
        first = sum(p.samples for p in self.plan.pipelines[:place])
        sizes = self.plan.pipelines[place].micro_batch_sizes
        edges = [first + sum(sizes[:i]) for i in range(len(sizes) + 1)]
        cuts = [tuple(t[a:b] for t in batch) for a, b in itertools.pairwise(edges)]
        row = make(self.plan).actions[self.here]
        return self.executor.step(number, row, routes, lambda s, m: cuts[m], self.plan.global_batch)

    def whole(self) -> list[torch.Tensor]:
        """All parameters, gathered; called on all devices."""
        self.owned.parameters.whole()
        return [p.detach().clone() for p in self.model.parameters()]


def on_device(job: Job, here: str, post: Post, wire: Wire) -> Seen:
    """All steps on one device."""
    device, seen = Device(job, here, post, wire), Seen()
    device.optimizer.register_step_pre_hook(lambda *_: seen.gradients.append(device.owned.whole_gradients()))
    for number, batch in enumerate(job.batches()):
        seen.results.append(device.step(number, batch))
    seen.parameters = device.whole()
    device.executor.close()
    return seen


def in_parts(job: Job) -> list[Seen]:
    """The steps of `job` on a thread a device."""
    office = PostOffice()

    def run(rank: int, wire: Wire) -> Seen:
        try:
            return on_device(job, job.names[rank], office.post(job.names[rank]), wire)
        except BaseException as e:
            office.leave(f"device {rank} failed: {type(e).__name__}: {e}")
            raise

    return together(run, len(job.parts))


def on_one(job: Job) -> PlainRun:
    """The same steps in a plain loop."""
    model = copy.deepcopy(job.model())
    optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
    return plain_loop(model, optimizer, job.batches(), lambda m, b: mse_loss(m(b[0]), b[1]), job.max_norm)
