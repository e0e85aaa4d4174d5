"""What tables outside of the devices cost: by size, against dense gradients, against torchrec's CPU path.

python benchmarks/tables.py --json                     everything but what needs torchrec
python benchmarks/tables.py --only torchrec --json     where torchrec==1.8.0 (--no-deps) and
                                                       fbgemm-gpu-cpu==1.8.0 are installed beside evener

Ids are drawn from a Zipf distribution (exponent 1.05) and spread over the table. All compared things take
turns in one process of one thread; medians are shown.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common import Bar, finish, parser, say
from benchmarks.recommender import recommender
from benchmarks.table_memory import memory
from evener.runtime.tables.layer import place_table
from evener.runtime.tables.optimizers import TableAdagrad, TableAdam, TableOptimizer, TableSGD
from evener.runtime.tables.sums import TableSums

LARGE, SMALL, DIM, BATCH = 2_000_000, 20_000, 64, 4096
EXPONENT = 1.05
RATE = 0.05


def zipf_ids(
    rows: int, batch: int, steps: int, seed: int = 0, popular: int | None = None
) -> list[torch.Tensor]:
    """Ids of every step, drawn among `popular` rows (all), which lie anywhere in the table."""
    rng = np.random.default_rng(seed)
    weights = np.cumsum(np.arange(1, (popular or rows) + 1, dtype=np.float64) ** -EXPONENT)
    place = rng.permutation(rows)
    draws = rng.random((steps, batch)) * weights[-1]
    return [torch.from_numpy(place[np.searchsorted(weights, row)]) for row in draws]


class Model(nn.Module):
    """A bag of ids and a perceptron on top."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.EmbeddingBag(rows, DIM, mode="sum")
        self.head = nn.Sequential(nn.Linear(DIM, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(ids))


Step = Callable[[torch.Tensor], None]


def resident_step(rows: int, optimizer: TableOptimizer) -> Step:
    """A training step with the table placed: lookup, backward, update of the rows and of the head."""
    model = Model(rows)
    table = place_table(model, "emb").table
    table.use(optimizer)
    rest = torch.optim.SGD(model.head.parameters(), lr=RATE)
    sums = TableSums([model.emb])  # type: ignore[list-item]
    sums.follow(rest)

    def step(ids: torch.Tensor) -> None:
        sums.begin(1.0)
        model(ids).square().mean().backward()
        sums.wait()
        rest.step()
        rest.zero_grad()
        sums.discard()

    return step


def torch_step(rows: int, make: Callable[[Any], torch.optim.Optimizer]) -> Step:
    """The same step in plain torch, with a gradient for every row of the table."""
    model = Model(rows)
    optimizer = make(model.parameters())

    def step(ids: torch.Tensor) -> None:
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(steps: Sequence[tuple[Step, Sequence[torch.Tensor]]], rounds: int) -> list[float]:
    """The median seconds of each step, all in turn in each round; the first rounds only warm up."""
    taken: list[list[float]] = [[] for _ in steps]
    for turn in range(rounds):
        for i in range(len(steps)):
            which = (i + turn) % len(steps)
            step, ids = steps[which]
            start = time.perf_counter()
            step(ids[turn % len(ids)])
            taken[which].append(time.perf_counter() - start)
    return [median(t[max(2, rounds // 10) :]) for t in taken]


OPTIMIZERS: dict[str, tuple[TableOptimizer, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (TableSGD(), lambda p: torch.optim.SGD(p, lr=RATE)),
    "row-wise adagrad": (TableAdagrad(row_wise=True), lambda p: torch.optim.Adagrad(p, lr=RATE)),
    "adam, dense": (TableAdam(), lambda p: torch.optim.Adam(p, lr=1e-3)),
    "adam, touched": (TableAdam(meaning="touched"), lambda p: torch.optim.Adam(p, lr=1e-3)),
}


def speed(args: argparse.Namespace) -> tuple[dict[str, Any], list[Bar]]:
    """A step on a large table against one on a small table, and against dense gradients.

    Both tables are asked for as many rows (20,000 popular ones), so that what is left is the table's size:
    that is held to the bar. The large table with Zipf ids of its own, from all of its rows, touches half as
    many rows again; it is timed beside them.
    """
    rounds, dense_rounds = (6, 3) if args.quick else (200, 6)
    large, small = (zipf_ids(rows, BATCH, 64, popular=SMALL) for rows in (LARGE, SMALL))
    wide = zipf_ids(LARGE, BATCH, 64)
    touched = [median(len(i.unique()) for i in ids) for ids in (large, small, wide)]
    figures: dict[str, Any] = {"rows_touched": dict(zip(("large", "small", "wide"), touched, strict=True))}
    bars = []
    for name, (ours, theirs) in OPTIMIZERS.items():
        if args.quick and name != "sgd":
            continue
        kinds = ((LARGE, large), (SMALL, small), (LARGE, wide))
        steps = [(resident_step(rows, ours), [i[:, None] for i in ids]) for rows, ids in kinds]
        large_s, small_s, wide_s = seconds(steps, rounds)
        (dense_s,) = seconds([(torch_step(LARGE, theirs), [i[:, None] for i in large])], dense_rounds)
        figures[name] = {"large_s": large_s, "small_s": small_s, "wide_s": wide_s, "dense_s": dense_s}
        figures[name] |= {"large_over_small": large_s / small_s, "wide_over_small": wide_s / small_s}
        say(
            f"{name}: {large_s * 1e3:.2f} ms of 2 million rows, {small_s * 1e3:.2f} ms of 20,000 "
            f"({large_s / small_s:.2f} times); {wide_s * 1e3:.2f} ms with ids from all 2 million "
            f"({wide_s / small_s:.2f} times, {touched[2] / touched[1]:.2f} times the rows); "
            f"{dense_s * 1e3:.0f} ms with dense gradients"
        )
        bars.append(Bar(name=f"{name}: large over small table", value=large_s / small_s, at_most=1.15))
        bars.append(Bar(name=f"{name}: dense over resident", value=dense_s / large_s, at_least=10.0))
    return figures, bars


def torchrec(args: argparse.Namespace) -> tuple[dict[str, Any], list[Bar]]:
    """The same lookup and update by torchrec's fused collection on the CPU, in turn with ours."""
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim import RowWiseAdagrad
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    rounds = 6 if args.quick else 200
    factors = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(1))
    figures: dict[str, Any] = {}
    bars = []
    for hot in (1, 10):
        ids = zipf_ids(LARGE, BATCH * hot, 16)
        lengths = torch.full((BATCH,), hot)
        for name, ours, theirs in (
            ("sgd", TableSGD(lr=RATE), torch.optim.SGD),
            ("row-wise adagrad", TableAdagrad(lr=RATE, row_wise=True, eps=1e-8), RowWiseAdagrad),
        ):
            model = nn.Sequential(nn.EmbeddingBag(LARGE, DIM, mode="sum"))
            config = EmbeddingBagConfig(
                name="emb", embedding_dim=DIM, num_embeddings=LARGE, feature_names=["f"]
            )
            fused = FusedEmbeddingBagCollection(
                tables=[config],
                optimizer_type=theirs,
                optimizer_kwargs={"lr": RATE} | ({"eps": 1e-8} if theirs is RowWiseAdagrad else {}),
                device=torch.device("cpu"),
            )
            weight = next(iter(fused.state_dict().values()))
            with torch.no_grad():
                weight.copy_(model[0].weight)
            table = place_table(model, "0").table
            table.use(ours)
            sums = TableSums([model[0]])  # type: ignore[list-item]

            def our_step(flat: torch.Tensor, model=model, sums=sums, table=table, hot=hot) -> None:
                sums.begin(1.0)
                (model(flat.view(BATCH, hot)) * factors).sum().backward()
                sums.wait()
                table.move(RATE)
                sums.discard()

            def their_step(flat: torch.Tensor, fused=fused, lengths=lengths) -> None:
                features = KeyedJaggedTensor.from_lengths_sync(["f"], flat, lengths)
                (fused(features)["f"] * factors).sum().backward()

            ours_s, theirs_s = seconds([(our_step, ids), (their_step, ids)], rounds)
            error = float((table.own(torch.arange(1000)) - weight[:1000]).abs().max())
            key = f"{name}, bags of {hot}"
            figures[key] = {"ours_s": ours_s, "torchrec_s": theirs_s, "difference": error}
            say(f"{key}: {ours_s * 1e3:.2f} ms, torchrec {theirs_s * 1e3:.2f} ms, rows differ by {error:.1g}")
            bars.append(Bar(name=f"{key}: ours over torchrec", value=ours_s / theirs_s, at_most=1.0))
            bars.append(Bar(name=f"{key}: rows differ", value=error, at_most=1e-3))
    return figures, bars


PARTS = {"speed": speed, "torchrec": torchrec, "recommender": recommender, "memory": memory}


def main() -> int:
    p = parser("What tables outside of the devices cost")
    p.add_argument("--only", default="speed,recommender,memory", help=f"parts, of {', '.join(PARTS)}")
    p.add_argument("--epochs", type=float, default=3.0, help="recommender: epochs of each run")
    p.add_argument("--rows", type=int, default=0, help="recommender: rows of the synthetic table")
    args = p.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    for name in args.only.split(","):
        figures[name], more = PARTS[name](args)
        bars += more
    return finish(figures, bars, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
