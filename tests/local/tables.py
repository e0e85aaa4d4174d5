"""A model with tables, trained on several devices and in a plain loop on one: what both are made from.

A case is drawn from a number: sizes, bounds, micro-batches, bags, optimiser. `train_cases` runs many in one
process group, `reference(case)` one in a plain loop.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from evener.core.actions import parse_action
from evener.runtime.executor import Executor
from evener.runtime.hardware import HardwareDriver
from evener.runtime.holding import Alone, Settings, whole_model
from evener.runtime.problem import Problem, default_inputs
from evener.runtime.ranks import Ranks
from evener.runtime.tables.exchange import RowExchange
from evener.runtime.tables.layer import place_table, table_layers
from evener.runtime.tables.optimizers import TableAdagrad, TableAdam, TableOptimizer, TableSGD
from evener.runtime.tables.sharing import fetch, gathered, in_memory, take_part
from evener.runtime.tables.sums import TableSums
from evener.runtime.wire import GroupWire, SoloWire

Batch = tuple[torch.Tensor, torch.Tensor]
Rule = Literal["sgd", "sgd decay", "adagrad", "adam", "adamw", "sparse sgd", "sparse adam"]
RULES: tuple[Rule, ...] = ("sgd", "sgd decay", "adagrad", "adam", "adamw", "sparse sgd", "sparse adam")
WORDS, GOODS, STEPS, WIDTH = 23, 9, 4, 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """`micro_batches[d]` are what device d runs of each global batch; `words`, `goods` where rows are."""

    number: int
    micro_batches: tuple[tuple[int, ...], ...]
    words: tuple[int, ...]
    goods: tuple[int, ...]
    rule: Rule
    mode: Literal["sum", "mean"]
    padding: int | None
    max_norm: float | None

    @property
    def samples(self) -> int:
        return sum(map(sum, self.micro_batches))


def drawn(number: int, devices: int) -> Case:
    """The case of that number."""
    rng = random.Random(number)

    def bounds(rows: int) -> tuple[int, ...]:
        cuts = sorted(rng.randint(0, rows) for _ in range(devices - 1))
        return (0, *cuts, rows)

    def sizes(at_least: int) -> tuple[int, ...]:
        return tuple(rng.randint(1, 4) for _ in range(rng.randint(at_least, 3)))

    return Case(
        number=number,
        micro_batches=tuple(sizes(1 if d == 0 else 0) for d in range(devices)),
        words=bounds(WORDS),
        goods=bounds(GOODS),
        rule=RULES[number % len(RULES)],
        mode=rng.choice(["sum", "mean"]),
        padding=rng.choice([None, 0]),
        max_norm=rng.choice([None, 0.3]),
    )


class Model(nn.Module):
    """A word, a bag of words by the same table, a bag of goods with another one, and a head."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(case.number)
        sparse = case.rule.startswith("sparse")
        self.word = nn.Embedding(WORDS, WIDTH, padding_idx=case.padding, sparse=sparse)
        self.goods = nn.EmbeddingBag(GOODS, WIDTH, mode=case.mode, padding_idx=case.padding, sparse=sparse)
        self.head = nn.Linear(3 * WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.word(x[:, 0]), self.word(x[:, 1:3]).mean(1), self.goods(x[:, 3:])]
        return self.head(torch.tanh(torch.cat(parts, 1)))


def batches(case: Case) -> list[Batch]:
    """Ids that are often the same, so that devices meet in rows; zeros are padding."""
    generator = torch.Generator().manual_seed(case.number)
    made = []
    for _ in range(STEPS):
        words = torch.randint(0, WORDS, (case.samples, 3), generator=generator) // 2
        goods = torch.randint(0, GOODS, (case.samples, 4), generator=generator)
        made.append((torch.cat([words, goods], 1), torch.randint(0, 4, (case.samples,), generator=generator)))
    return made


def optimizer_of(rule: Rule) -> tuple[Callable[[Any], torch.optim.Optimizer], TableOptimizer]:
    """(torch's for a whole table, ours), with a learning rate of 0.1 (Adam: 0.01)."""
    found: dict[Rule, tuple[Callable[[Any], torch.optim.Optimizer], TableOptimizer]] = {
        "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), TableSGD()),
        "sgd decay": (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), TableSGD(weight_decay=0.1)),
        "adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.1), TableAdagrad()),
        "adam": (lambda p: torch.optim.Adam(p, lr=0.01), TableAdam()),
        "adamw": (
            lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
            TableAdam(weight_decay=0.1, decoupled=True),
        ),
        "sparse sgd": (lambda p: torch.optim.SGD(p, lr=0.1), TableSGD(meaning="touched")),
        "sparse adam": (lambda p: torch.optim.SparseAdam(p, lr=0.01), TableAdam(lr=0.01, meaning="touched")),
    }
    return found[rule]


def head_optimizer(case: Case, parameters: Any) -> torch.optim.Optimizer:
    """What moves the rest of the model: the same rule, or SGD where torch's rule takes sparse gradients."""
    if case.rule == "sparse adam":
        return torch.optim.SGD(parameters, lr=0.1)
    return optimizer_of(case.rule)[0](parameters)


def reference(case: Case) -> dict[str, torch.Tensor]:
    """The parameters after a plain loop over whole global batches, in float64."""
    model = Model(case).double()
    tables = [model.word.weight, model.goods.weight]
    movers = [head_optimizer(case, model.head.parameters()), optimizer_of(case.rule)[0](tables)]
    for x, y in batches(case):
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        grads = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in model.parameters()]
        norm = torch.stack([g.norm() for g in grads]).norm()
        if case.max_norm is not None and norm > case.max_norm:
            for p in model.parameters():
                p.grad = p.grad * (case.max_norm / (norm + 1e-6))
        for mover in movers:
            mover.step()
    return {n: p.detach() for n, p in model.named_parameters()}


def train_cases(rank: int, world_size: int, numbers: list[int]) -> list[dict[str, torch.Tensor]]:
    """What one device of several ends with in each case; tables on device 0 alone."""
    return [train(rank, world_size, drawn(number, world_size)) for number in numbers]


def train(rank: int, world_size: int, case: Case) -> dict[str, torch.Tensor]:
    """One device's part of a case, through the executor."""
    model = Model(case).double()
    exchange = RowExchange(world_size)
    places = {"word": case.words, "goods": case.goods}
    ours = optimizer_of(case.rule)[1]
    for name, bounds in places.items():
        table = place_table(model, name).table
        take_part(table, bounds, rank, exchange, in_memory, seed=0)
        table.use(ours)
    optimizer = head_optimizer(case, model.head.parameters())
    sums = TableSums(table_layers(model))
    sums.follow(optimizer)
    problem = Problem(loss=cross_entropy, inputs=default_inputs)
    ranks = Ranks(tuple(f"test/{d}" for d in range(world_size)), f"test/{rank}")
    wire = GroupWire() if world_size > 1 else SoloWire()
    holding = whole_model(model, problem, ranks, wire)
    holding.reducers.add_tables(sums, world_size)
    driver = HardwareDriver(torch.device("cpu"))
    executor = Executor(holding, optimizer, problem, ranks, driver, Settings(max_norm=case.max_norm))
    mine = case.micro_batches[rank]
    first = sum(map(sum, case.micro_batches[:rank]))
    edges = list(accumulate(mine, initial=first))
    words = [f"0{kind}{m}" for m in range(len(mine)) for kind in "FB"] + ["0REDUCE_GRAD", "STEP"]
    row = tuple(parse_action(word) for word in words)
    ids_of = {"word": lambda batch: batch[0][:, :3], "goods": lambda batch: batch[0][:, 3:]}
    for step, batch in enumerate(batches(case)):
        cut = deque(tuple(t[a:b] for t in batch) for a, b in pairwise(edges))
        if world_size > 1:
            fetch(sums.tables, ids_of, list(cut), exchange)
        executor.step(step, row, Alone(mine), lambda *_, cut=cut: cut.popleft(), case.samples)
    ends = {f"head.{n}": p.detach() for n, p in model.head.named_parameters()}
    for table in sums.tables:
        whole = gathered(table, rank, exchange)
        if whole is not None:
            ends[f"{table.name}.weight"] = whole
    sums.close()
    executor.close()
    return ends
