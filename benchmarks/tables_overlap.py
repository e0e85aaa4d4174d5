"""How much of the way of a table's rows to an accelerator does the computing hide?

python benchmarks/tables_overlap.py --json

A rehearsed accelerator at a tenth of an RTX 3060's speed and of its link's takes steps of a bag of ids and a
perceptron, the table in host memory. The same steps three times: rows looked up when the model asks for them,
rows sent ahead, and sent ahead in no time. What a step takes beyond the last is exposed. Seconds are those of
the device's own clock, without the reading of samples; `rows_s` are the spans in which its trace says that it
waited for rows.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common import Bar, finish, parser, run_processes, say
from benchmarks.tables import DIM, zipf_ids
from evener.core.actions import parse_action
from evener.core.catalogue import FleetFile, FleetLine, Scale, resolved
from evener.core.fleet import Device
from evener.runtime.executor import Executor
from evener.runtime.holding import Alone, Settings, whole_model
from evener.runtime.problem import Problem, default_inputs
from evener.runtime.ranks import Ranks
from evener.runtime.tables.ahead import Lookahead
from evener.runtime.tables.layer import place_table, table_layers
from evener.runtime.tables.optimizers import TableAdam, TableOptimizer, TableSGD
from evener.runtime.tables.transfers import Lanes, Outgoing
from evener.runtime.wire import SoloWire
from evener.session.layout.job_tables import JobTables
from evener.session.site import open_site

Kind = Literal["asked for", "ahead", "no time"]
KINDS: tuple[Kind, ...] = ("asked for", "ahead", "no time")
OPTIMIZERS: dict[str, tuple[TableOptimizer, Any]] = {
    "sgd": (TableSGD(), lambda p: torch.optim.SGD(p, lr=0.05)),
    "adam, dense": (TableAdam(), lambda p: torch.optim.Adam(p, lr=1e-3)),
}


@dataclass(frozen=True)
class Size:
    """Rows of the table, samples of a micro-batch, micro-batches of a step, widths of the perceptron."""

    rows: int = 2_000_000
    batch: int = 4096
    micro_batches: int = 8
    widths: tuple[int, ...] = (512, 256)
    steps: int = 5


SMALL = Size(rows=5_000, batch=256, widths=(256, 64), steps=3)


@dataclass(frozen=True)
class Taken:
    """Medians over steps: seconds of a step, those waiting for rows by the trace, and those of all copies."""

    step_s: float
    rows_s: float
    transfer_s: float
    num_bytes: float


class CountedLanes(Lanes):
    """Lanes that sum what their copies take, or take no time at all."""

    def __init__(self, device: torch.device, card: Any, *, free: bool) -> None:
        super().__init__(device)
        self._card, self._free = card, free
        self.seconds = self.num_bytes = 0.0

    def sent(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self._count(sum(t.nbytes for t in tensors))
        if not self._free:
            return super().sent(tensors)
        with self._card.aside():
            return super().sent(tensors)

    def outgoing(self, tensor: Tensor) -> Outgoing:
        self._count(tensor.nbytes)
        if not self._free:
            return super().outgoing(tensor)
        with self._card.aside():
            return super().outgoing(tensor)

    def _count(self, num_bytes: int) -> None:
        self.seconds += self._card.host_link.seconds(num_bytes)
        self.num_bytes += num_bytes


class Model(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.EmbeddingBag(size.rows, DIM, mode="sum")
        widths = (DIM, *size.widths)
        layers = [x for a, b in pairwise(widths) for x in (nn.Linear(a, b), nn.ReLU())]
        self.head = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.emb(ids))


def measured(kind: Kind, size: Size, optimizer: str = "sgd") -> Taken:
    """Steps of one kind in this process, whose accelerator is opened."""
    file = FleetFile(
        devices=(Device(name="lab/gpu0", kind="RTX 3060"),),
        links=(FleetLine(a="lab", b="lab", kind="PCIe 4.0 x16"),),
        scaled=Scale(slower=10.0),
    )
    fleet = resolved(file, "here").as_rehearsed()
    site = open_site(fleet.devices[0], rehearse=True, fleet=fleet)
    device, card = site.torch_device, site.driver.card  # type: ignore[attr-defined]
    model = Model(size)
    table = place_table(model, "emb").table
    ours, theirs = OPTIMIZERS[optimizer]
    table.use(ours)
    model.to(device)
    head = theirs(model.head.parameters())
    problem = Problem(loss=nn.functional.mse_loss, inputs=default_inputs)
    ranks = Ranks((site.device.name,), site.device.name)
    holding = whole_model(model, problem, ranks, SoloWire(), device=device)
    tables = JobTables(layers=table_layers(model), ids_of={"emb": lambda batch: batch[0]})
    tables.join(holding.reducers, [model])
    assert tables.sums is not None
    tables.sums.follow(head)
    lanes = CountedLanes(device, card, free=kind == "no time")
    if kind != "asked for":
        tables.lookahead = Lookahead(tables.layers, tables.ids_of, lanes, tables.sums.rate_of)
        tables.sums.moved = tables.lookahead.settle
        holding = replace(holding, ahead=tables.lookahead)
    executor = Executor(holding, head, problem, ranks, site.driver, Settings())
    sizes = (size.batch,) * size.micro_batches
    words = [f"0{word}{m}" for m in range(size.micro_batches) for word in "FB"] + ["0REDUCE_GRAD", "STEP"]
    row = tuple(parse_action(word) for word in words)
    every = zipf_ids(size.rows, size.batch, size.micro_batches * size.steps)
    stream = iter([(ids[:, None].pin_memory(), torch.zeros(size.batch, 1).pin_memory()) for ids in every])
    found = []
    for step in range(size.steps):
        lanes.seconds = lanes.num_bytes = 0.0
        read = tables.ahead(lambda: next(stream), size.micro_batches, last=step == size.steps - 1)
        result = executor.step(step, row, Alone(sizes), read, size.batch * size.micro_batches)
        rows_s = sum(x.end_s - x.start_s for x in executor.spans if x.action == "ROWS" and x.step == step)
        taken_s = result.step_s - result.seconds.get("input", 0.0)
        found.append((taken_s, rows_s, lanes.seconds, lanes.num_bytes))
    executor.close()
    # The first step sends more than it asks for, the last less.
    return Taken(*(median(column) for column in zip(*found[1:-1], strict=True)))


def one(rank: int, world_size: int, kind: Kind, size: Size, optimizer: str) -> Taken:
    torch.set_num_threads(1)
    return measured(kind, size, optimizer)


def overlap(args: argparse.Namespace) -> tuple[dict[str, Any], list[Bar]]:
    """Exposed seconds of each kind, each in a process of its own."""
    size = SMALL if args.quick else Size()
    figures: dict[str, Any] = {}
    bars = []
    for name in OPTIMIZERS:
        asked, ahead, free = (run_processes(one, 1, kind, size, name)[0] for kind in KINDS)
        exposed = {"asked for": asked.step_s - free.step_s, "ahead": ahead.step_s - free.step_s}
        figures[name] = {
            "step_s": {"asked for": asked.step_s, "ahead": ahead.step_s, "in no time": free.step_s},
            "exposed_s": exposed,
            "rows_s": ahead.rows_s,
            "transfer_s": ahead.transfer_s,
            "transfer_bytes": ahead.num_bytes,
        }
        say(
            f"{name}: {ahead.num_bytes / 2**20:.1f} MiB a step take {ahead.transfer_s * 1e3:.2f} ms; exposed "
            f"{exposed['asked for'] * 1e3:.2f} ms asked for, {exposed['ahead'] * 1e3:.2f} ms ahead (by the "
            f"trace {ahead.rows_s * 1e3:.2f}), of {asked.step_s * 1e3:.1f} ms a step"
        )
        part = exposed["ahead"] / ahead.transfer_s
        bars.append(Bar(name=f"{name}: exposed over transfer, sent ahead", value=part, at_most=0.1))
        part = exposed["asked for"] / ahead.transfer_s
        bars.append(Bar(name=f"{name}: exposed over transfer, asked for", value=part, at_least=0.9))
    return figures, bars


def main() -> int:
    p = parser(str(__doc__).partition("\n")[0])
    args = p.parse_args()
    figures, bars = overlap(args)
    return finish(figures, bars, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
