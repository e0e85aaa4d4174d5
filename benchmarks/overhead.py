"""Where nothing is uneven: what a step of evener costs beside a step of DDP, unpaced.

Two equal processes of one thread hold the same model three times, once under evener's executor and twice
under DDP, and take steps with them in turn. The second DDP is the control: what its ratio to the first
differs from 1 is what this machine cannot tell apart.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import run_processes, say
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from evener.core.actions import parse_action
from evener.runtime.executor import Executor
from evener.runtime.hardware import HardwareDriver
from evener.runtime.holding import Alone, Settings, whole_model
from evener.runtime.problem import Problem, default_inputs
from evener.runtime.ranks import Ranks
from evener.runtime.wire import GroupWire

VOCABULARY, WIDTH, LAYERS = 256, 256, 6
CASES = {"two micro-batches": ((5, 3), 31), "one micro-batch": ((3,), 33)}
"""Sizes of a process's micro-batches in sequences, and the length of a sequence: all odd."""
ORDERS = ((0, 1, 2), (1, 2, 0), (2, 0, 1))
WARM_UP = 4
NAMES = ("evener", "ddp", "control")
Batch = tuple[Tensor, Tensor]
Step = Callable[[int], None]


class Model(nn.Module):
    """A transformer of 4.9 million parameters over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(LAYERS)
            )
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens)))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over all places."""
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def fresh() -> tuple[nn.Module, Callable[[nn.Module], torch.optim.Optimizer]]:
    """The same model every time, and its optimiser."""
    torch.manual_seed(0)
    return Model(), lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4)


def evener_step(rank: int, world_size: int, batches: list[Batch]) -> tuple[nn.Module, Step]:
    """A function that takes one step under evener's executor."""
    model, optimizer = fresh()
    names = tuple(f"host/cpu{r}" for r in range(world_size))
    cpu = torch.device("cpu")
    problem = Problem(loss=loss_of, inputs=default_inputs)
    ranks = Ranks(names, names[rank])
    holding = whole_model(model, problem, ranks, GroupWire())
    executor = Executor(holding, optimizer(model), problem, ranks, HardwareDriver(cpu), Settings())
    sizes = tuple(len(x) for x, _ in batches)
    words = [f"0{kind}{m}" for m in range(len(sizes)) for kind in "FB"] + ["0REDUCE_GRAD", "STEP"]
    row = tuple(parse_action(word) for word in words)

    def step(number: int) -> None:
        fetch = iter(batches)
        executor.step(number, row, Alone(sizes), lambda *_: next(fetch), world_size * sum(sizes))

    return model, step


def ddp_step(batches: list[Batch]) -> tuple[nn.Module, Step]:
    """A function that takes the same step under DDP: gradients accumulate unsummed until the last one."""
    model, optimizer_of = fresh()
    ddp = DistributedDataParallel(model)
    optimizer = optimizer_of(model)
    total = sum(len(x) for x, _ in batches)

    def step(number: int) -> None:
        optimizer.zero_grad()
        for m, (x, y) in enumerate(batches):
            with nullcontext() if m == len(batches) - 1 else ddp.no_sync():
                (loss_of(ddp(x), y) * (len(x) / total)).backward()
        optimizer.step()

    return model, step


def race(rank: int, world_size: int, sizes: tuple[int, ...], length: int, triples: int) -> dict[str, Any]:
    """Seconds of `triples` steps by rival, taken in turn, by the clock and of processor time, and each
    rival's final loss on one batch.
    """
    generator = torch.Generator().manual_seed(1 + rank)
    batches = []
    for size in sizes:
        text = torch.randint(0, VOCABULARY, (size, length + 1), generator=generator)
        batches.append((text[:, :-1], text[:, 1:]))
    rivals = [evener_step(rank, world_size, batches), ddp_step(batches), ddp_step(batches)]
    seconds: list[list[float]] = [[], [], []]
    busy: list[list[float]] = [[], [], []]
    for number in range(WARM_UP + triples):
        for which in ORDERS[number % len(ORDERS)]:
            dist.barrier()
            start, start_busy = time.perf_counter(), time.process_time()
            rivals[which][1](number)
            if number >= WARM_UP:
                seconds[which].append(time.perf_counter() - start)
                busy[which].append(time.process_time() - start_busy)
    with torch.no_grad():
        losses = [float(loss_of(model(batches[0][0]), batches[0][1])) for model, _ in rivals]
    return {"seconds": seconds, "busy": busy, "losses": losses}


def overhead(name: str, triples: int) -> dict[str, Any]:
    """Ratios of medians for case `name`: evener to DDP, the control to DDP, and what was measured."""
    sizes, length = CASES[name]
    results = run_processes(race, 2, sizes, length, triples)
    # A step ends when the slower of the two processes has ended it.
    medians = {name: median(map(max, *(r["seconds"][i] for r in results))) for i, name in enumerate(NAMES)}
    busy = {name: median(map(max, *(r["busy"][i] for r in results))) for i, name in enumerate(NAMES)}
    ratio, control = medians["evener"] / medians["ddp"], medians["control"] / medians["ddp"]
    say(
        f"overhead, {name}: evener {medians['evener'] * 1e3:.1f} ms, DDP {medians['ddp'] * 1e3:.1f} ms, "
        f"second DDP {medians['control'] * 1e3:.1f} ms over {triples} triples: "
        f"ratio {ratio:.3f}, control {control:.3f}, processor time {busy['evener'] / busy['ddp']:.3f}"
    )
    return {
        "case": name,
        "ratio": ratio,
        "control": control,
        "bar": 1.0 + abs(control - 1.0),
        "median_s": medians,
        "processor_s": busy,
        "triples": triples,
        "final_loss": dict(zip(NAMES, results[0]["losses"], strict=True)),
    }
