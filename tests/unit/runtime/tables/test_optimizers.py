"""A table's optimiser moves rows as torch's moves the whole table, dense or sparse."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from evener.errors import ModelError, UsageError
from evener.runtime.tables.optimizers import TableAdagrad, TableAdam, TableOptimizer, TableSGD, like_torch
from evener.runtime.tables.rows import WEIGHT, MemoryRows

ROWS, DIM, STEPS = 12, 3, 60
Make = Callable[[list], torch.optim.Optimizer]


def gradients(steps: int = STEPS, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and gradient rows of every step; row 3 is touched in the first and last step alone, row 5 never."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for step in range(steps):
        ids = torch.randperm(ROWS, generator=generator)[:4].sort().values
        ids = ids[(ids != 3) & (ids != 5)]
        if step in (0, steps - 1):
            ids = torch.cat([ids, torch.tensor([3])]).unique()
        made.append((ids, torch.randn(len(ids), DIM, generator=generator, dtype=torch.float64)))
    return made


def by_torch(make: Make, sparse: bool, rate: Callable[[int], float], steps: int = STEPS) -> torch.Tensor:
    """The table after all steps under a torch optimiser."""
    weight = torch.nn.Parameter(start())
    optimizer = make([weight])
    base = optimizer.param_groups[0]["lr"]
    for step, (ids, rows) in enumerate(gradients(steps)):
        optimizer.param_groups[0]["lr"] = base * rate(step)
        grad = torch.sparse_coo_tensor(ids[None], rows, weight.shape, is_coalesced=True)
        weight.grad = grad if sparse else grad.to_dense()
        optimizer.step()
    return weight.detach()


def by_table(
    optimizer: TableOptimizer, lr: float, rate: Callable[[int], float], steps: int = STEPS
) -> torch.Tensor:
    """The table after all steps, rows caught up just when they are read, and all of them in the end."""
    rows = MemoryRows(start())
    rows.prepare(optimizer.widths(DIM))
    rates = np.zeros(0)
    for step, (ids, gradient) in enumerate(gradients(steps)):
        optimizer.catch_up(rows, ids, rates)
        rates = np.append(rates, lr * rate(step))
        optimizer.move(rows, ids, gradient, rates)
    optimizer.catch_up(rows, torch.arange(ROWS), rates)
    return rows.columns[WEIGHT]


def start() -> torch.Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def flat(step: int) -> float:
    return 1.0


def falling(step: int) -> float:
    return 1.0 / (1 + step / 10)


DENSE: list[tuple[str, Make]] = [
    ("sgd", lambda p: torch.optim.SGD(p, lr=0.1)),
    ("sgd with decay", lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01)),
    ("adagrad", lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5, lr_decay=0.1)),
    ("adam", lambda p: torch.optim.Adam(p, lr=0.01)),
    ("adam of other betas", lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95))),
    ("adam of equal betas", lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.9, 0.81))),
    ("adam without mean", lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.0, 0.99))),
    ("adam of large eps", lambda p: torch.optim.Adam(p, lr=0.01, eps=0.1)),
    ("adam with decay", lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1)),
    ("adamw", lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
]


@pytest.mark.parametrize("rate", [flat, falling])
@pytest.mark.parametrize(("name", "make"), DENSE, ids=[n for n, _ in DENSE])
def test_dense_meaning_is_the_dense_optimiser(name: str, make: Make, rate: Callable[[int], float]) -> None:
    reference = make([torch.nn.Parameter(start())])
    ours = by_table(like_torch(reference, "emb"), reference.defaults["lr"], rate)
    torch.testing.assert_close(ours, by_torch(make, False, rate), rtol=0, atol=1e-10)


def test_dense_adam_after_a_gap_of_two_thousand_steps() -> None:
    make: Make = lambda p: torch.optim.Adam(p, lr=0.01)  # noqa: E731
    ours = by_table(TableAdam(), 0.01, falling, 2000)
    torch.testing.assert_close(ours, by_torch(make, False, falling, 2000), rtol=0, atol=1e-9)


SPARSE: list[tuple[str, Make, TableOptimizer]] = [
    ("sgd", lambda p: torch.optim.SGD(p, lr=0.1), TableSGD(meaning="touched")),
    ("adagrad", lambda p: torch.optim.Adagrad(p, lr=0.1), TableAdagrad()),
    ("adam", lambda p: torch.optim.SparseAdam(p, lr=0.01), TableAdam(meaning="touched")),
]


@pytest.mark.parametrize(("name", "make", "ours"), SPARSE, ids=[n for n, _, _ in SPARSE])
def test_touched_meaning_is_the_sparse_optimiser(name: str, make: Make, ours: TableOptimizer) -> None:
    lr = make([torch.nn.Parameter(start())]).defaults["lr"]
    got, want = by_table(ours, lr, falling), by_torch(make, True, falling)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(got[5], start()[5])


def test_the_two_meanings_of_adam_differ() -> None:
    dense, touched = (by_table(TableAdam(meaning=m), 0.1, flat) for m in ("dense", "touched"))  # type: ignore[arg-type]
    assert float((dense - touched).abs().max()) > 0.01


def test_row_wise_adagrad_keeps_one_mean_square_a_row() -> None:
    rows = MemoryRows(torch.tensor([[1.0, 2.0], [5.0, 6.0]]))
    optimizer = TableAdagrad(row_wise=True, eps=0.0)
    rows.prepare(optimizer.widths(2))
    optimizer.move(rows, torch.tensor([0]), torch.tensor([[3.0, 1.0]]), np.array([0.5]))
    scale = 5.0**0.5  # √((9 + 1) / 2)
    want = torch.tensor([[1 - 0.5 * 3 / scale, 2 - 0.5 / scale], [5.0, 6.0]])
    torch.testing.assert_close(rows.columns[WEIGHT], want)
    assert rows.columns["sum"].tolist() == [[5.0], [0.0]]


def test_what_tables_cannot_do_is_refused() -> None:
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.RMSprop(p),
    ):
        with pytest.raises(ModelError, match="the table emb cannot be moved"):
            like_torch(make([torch.nn.Parameter(torch.zeros(1))]), "emb")
    with pytest.raises(UsageError, match="betas"):
        TableAdam(betas=(0.9, 1.0))
    with pytest.raises(UsageError, match="lr"):
        TableSGD(lr=-1.0)
    with pytest.raises(UsageError, match="meaning"):
        TableAdam(meaning="lazy")  # type: ignore[arg-type]
