"""For any model, loss, split and micro-batches, unequal devices have the gradient of a single device.

Devices are threads of this process, each with an executor and a copy of the model.
"""

import copy
import itertools
from dataclasses import dataclass
from functools import partial

import torch
from hypothesis import HealthCheck, assume, example, given, note, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from evener.core.actions import parse_action
from evener.runtime.executor import Executor, StepResult
from evener.runtime.holding import Alone, Settings, whole_model
from evener.runtime.problem import Problem, default_inputs
from evener.runtime.ranks import Ranks
from tests.fakes import ScriptedDriver, ThreadedWire, together
from tests.reference import Gradients, PlainRun, plain_loop, relative_error

IGNORE, WORDS, LENGTH = -100, 7, 3
LIMIT = {torch.float32: 1e-6, torch.float64: 1e-12}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is drawn of a model. `rare` adds a layer that only samples beginning with word 0 go through."""

    width: int
    depth: int
    tied: bool
    norm: bool
    idle: bool
    frozen: bool
    rare: bool
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Task:
    """Micro-batch sizes by device, the loss, how it is sent; `valid` is the share of labels that count."""

    split: tuple[tuple[int, ...], ...]
    reduction: str
    valid: float | None
    max_norm: float | None
    loss_scale: float | None
    bucket_bytes: int
    forwards_first: bool
    seed: int

    @property
    def samples(self) -> int:
        return sum(map(sum, self.split))


class Words(nn.Module):
    """Embedding → layers → logits for every word of (samples, LENGTH)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(width) if shape.norm else nn.Identity()
        self.rare = nn.Linear(width, width) if shape.rare else None
        self.head = nn.Linear(width, WORDS, bias=False)
        self.idle = nn.Linear(2, 2) if shape.idle else None
        if shape.tied:
            self.head.weight = self.embed.weight
        if shape.frozen and shape.depth:
            self.layers[0].weight.requires_grad_(False)
        self.to(shape.dtype)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        begins = words[:, 0] == 0
        if self.rare is not None and begins.any():
            x = x + begins[:, None, None] * self.rare(x)
        return self.head(self.norm(x))


def batch_of(task: Task) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(task.seed)
    words = torch.randint(0, WORDS, (task.samples, LENGTH), generator=generator)
    labels = torch.randint(0, WORDS, (task.samples, LENGTH), generator=generator)
    if task.valid is not None:
        labels[torch.rand(labels.shape, generator=generator) > task.valid] = IGNORE
    return words, labels


def num_valid(batch: tuple[torch.Tensor, torch.Tensor]) -> int:
    return int((batch[1] != IGNORE).sum())


def word_loss(output: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    return cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction=reduction)


def absent_alike(expected: Gradients, got: Gradients) -> Gradients:
    """`expected` with a gradient of zero absent where `got` has none.

    A parameter that only samples without a valid label go through: micro-batches of weight 0 are not run.
    """
    return [
        None if b is None and a is not None and not a.any() else a for a, b in zip(expected, got, strict=True)
    ]


def on_one(model: nn.Module, task: Task) -> PlainRun:
    batch = batch_of(task)
    count = task.samples if task.valid is None else num_valid(batch)

    def mean_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = word_loss(model(batch[0]), batch[1], task.reduction)
        return loss / count if task.reduction == "sum" else loss

    return plain_loop(model, torch.optim.SGD(model.parameters(), lr=0.1), [batch], mean_loss, task.max_norm)


def on_device(rank: int, wire: ThreadedWire, model: nn.Module, task: Task) -> tuple[Gradients, StepResult]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = tuple(f"test/{d}" for d in range(len(task.split)))
    problem = Problem(
        loss=partial(word_loss, reduction=task.reduction),
        inputs=default_inputs,
        reduction=task.reduction,
        weight=None if task.valid is None else num_valid,
    )
    ranks = Ranks(names, names[rank])
    wishes = Settings(max_norm=task.max_norm, loss_scale=task.loss_scale)
    holding = whole_model(model, problem, ranks, wire, bucket_bytes=task.bucket_bytes)
    executor = Executor(holding, optimizer, problem, ranks, ScriptedDriver(), wishes)
    got: list[Gradients] = []
    optimizer.register_step_pre_hook(
        lambda *_: got.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    )
    sizes = task.split[rank]
    first = sum(map(sum, task.split[:rank]))
    edges = [first + sum(sizes[:i]) for i in range(len(sizes) + 1)]
    whole = batch_of(task)
    cut = iter([tuple(t[a:b] for t in whole) for a, b in itertools.pairwise(edges)])
    micro_batches = range(len(sizes))
    if task.forwards_first:
        words = [f"0F{m}" for m in micro_batches] + [f"0B{m}" for m in micro_batches]
    else:
        words = [f"0{kind}{m}" for m in micro_batches for kind in "FB"]
    row = tuple(parse_action(word) for word in [*words, "0REDUCE_GRAD", "STEP"])
    result = executor.step(0, row, Alone(sizes), lambda *_: next(cut), task.samples)
    assert len(got) == 1, result.verdict.reason
    return got[0], result


shapes = st.builds(
    Shape,
    # Not 2: a LayerNorm of two features gives ±1, its gradient is what rounding leaves of it.
    width=st.integers(4, 8),
    depth=st.integers(0, 3),
    tied=st.booleans(),
    norm=st.booleans(),
    idle=st.booleans(),
    frozen=st.booleans(),
    rare=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
micro_batch_sizes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
tasks = st.builds(
    Task,
    split=st.lists(micro_batch_sizes, min_size=2, max_size=3).filter(any).map(tuple),
    reduction=st.sampled_from(["mean", "sum"]),
    valid=st.sampled_from([None, None, 0.2, 0.8]),
    max_norm=st.sampled_from([None, 0.1, 100.0]),
    loss_scale=st.sampled_from([None, None, 1024.0]),
    bucket_bytes=st.sampled_from([1, 150, 8 * 2**20]),
    forwards_first=st.booleans(),
    seed=st.integers(0, 999),
)
PLAIN_SHAPE = Shape(
    width=4, depth=2, tied=True, norm=True, idle=True, frozen=True, rare=True, dtype=torch.float64
)
# Three devices: one of a single sample, one of none, one of several micro-batches.
PLAIN_TASK = Task(
    split=((1,), (), (3, 3, 2)),
    reduction="mean",
    valid=0.2,
    max_norm=0.1,
    loss_scale=1024.0,
    bucket_bytes=1,
    forwards_first=True,
    seed=0,
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@example(shape=PLAIN_SHAPE, task=PLAIN_TASK)
@given(shape=shapes, task=tasks)
def test_the_gradient_of_any_split_is_that_of_one_device(shape: Shape, task: Task) -> None:
    assume(task.valid is None or num_valid(batch_of(task)) > 0)
    torch.manual_seed(task.seed)
    model = Words(shape)
    want = on_one(copy.deepcopy(model), task)
    got = together(lambda rank, wire: on_device(rank, wire, model, task), len(task.split))
    limit = LIMIT[shape.dtype]
    if shape.dtype == torch.float32:  # no closer than one device's own rounding lets it be: 1.2e-6 was drawn
        rounding = relative_error(want.gradients[0], on_one(copy.deepcopy(model).double(), task).gradients[0])
        limit = max(limit, 4 * rounding)
    for gradients, result in got:
        expected = want.gradients[0]
        if shape.rare and task.valid is not None:
            expected = absent_alike(expected, gradients)
        error = relative_error(gradients, expected)
        note(f"error {error:.1e}, norm {want.norms[0]:.3g}")
        assert error <= limit
        assert abs(result.totals.loss - want.losses[0]) <= limit * max(1.0, abs(want.losses[0]))
        assert result.gradient_norm is None or abs(result.gradient_norm / want.norms[0] - 1) <= limit
        assert all(
            (a is None and b is None) or torch.equal(a, b) for a, b in zip(gradients, got[0][0], strict=True)
        )
