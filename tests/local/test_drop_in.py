"""`ev.prepare`: an existing loop, loss code unchanged, gives what one device gives."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import evener as ev
from tests.local.pool import Pool
from tests.reference import relative_error

SAMPLES = 22  # no multiple of the batch: the last batch of an epoch is smaller
BATCH = 8


def data(*, masked: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 5, generator=g, dtype=torch.float64)
    y = torch.randint(0, 3, (SAMPLES,), generator=g)
    if masked:
        y[1:6] = -100  # with a split of 6/2 one device has a micro-batch without any valid label
    return list(zip(x, y, strict=True))


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def loop(
    model,
    optimizer,
    loader,
    scheduler,
    *,
    fault: Callable[[int], None] = lambda turn: None,
    reduction: str = "mean",
) -> None:
    """A training loop as people write it."""
    turn = 0
    for _ in range(3):
        for x, y in loader:
            try:
                fault(turn)
                loss = nn.functional.cross_entropy(model(x), y, reduction=reduction)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
            except torch.OutOfMemoryError:
                torch.manual_seed(1)  # the user's own way of carrying on
            optimizer.zero_grad()
            turn += 1


def valid(batch: Any) -> Any:
    return (batch[1] != -100).sum()


def join_job(rank: int, world_size: int, port: int) -> None:
    """Make this process of the pool one that torchrun would have started."""
    dist.barrier()  # nobody leaves while another still joins
    dist.destroy_process_group()
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )


def in_job(rank: int, world_size: int, port: int, case: dict[str, Any]) -> list[torch.Tensor]:
    """The loop as one process of a job that torchrun would have started."""
    join_job(rank, world_size, port)
    model, optimizer, scheduler = parts()
    masked = case.get("masked", False)
    model, optimizer, loader = ev.prepare(
        model,
        optimizer,
        DataLoader(data(masked=masked), batch_size=BATCH),
        scheduler=scheduler,
        batch_per_device=case["split"],
        micro_batch=case["micro_batch"],
        weight=valid if masked else None,
        reduction=case.get("reduction", "mean"),
    )

    def fault(turn: int) -> None:
        if case.get("fault") == (rank, turn):
            raise torch.OutOfMemoryError("scripted")

    loop(model, optimizer, loader, scheduler, fault=fault, reduction=case.get("reduction", "mean"))
    return [p.detach().clone() for p in model.parameters()]


def run(pool: Pool, world_size: int, **case: Any) -> list[list[torch.Tensor]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return pool.run(in_job, world_size, store.port, case)


def alone(*, masked: bool = False, reduction: str = "mean", without: int | None = None) -> list[torch.Tensor]:
    """The loop on one device; `without` is a turn that fails there."""

    def fault(turn: int) -> None:
        if turn == without:
            raise torch.OutOfMemoryError("scripted")

    model, optimizer, scheduler = parts()
    loader = DataLoader(data(masked=masked), batch_size=BATCH)
    loop(model, optimizer, loader, scheduler, fault=fault, reduction=reduction)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("split", "micro_batch"), [([6, 2], None), ([6, 2], 4), ([7, 1], 3), ([5, 2, 1], 2)], ids=str
)
def test_an_existing_loop_gives_what_one_device_gives(pool: Pool, split: list[int], micro_batch) -> None:
    expected = alone()
    for parameters in run(pool, len(split), split=split, micro_batch=micro_batch):
        assert relative_error(parameters, expected) < 1e-12


def test_masked_labels_count_by_valid_label_even_where_there_is_none(pool: Pool) -> None:
    expected = alone(masked=True)
    for parameters in run(pool, 2, split=[6, 2], micro_batch=2, masked=True):
        assert relative_error(parameters, expected) < 1e-12


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_loss_given_as_a_sum(pool: Pool, micro_batch: int | None) -> None:
    """Once counted by samples like a mean: 0.2 off, without a word."""
    expected = alone(reduction="sum")
    for parameters in run(pool, 2, split=[6, 2], micro_batch=micro_batch, reduction="sum"):
        assert relative_error(parameters, expected) < 1e-12


def test_an_error_that_user_code_catches_on_one_device_skips_the_step_on_all(pool: Pool) -> None:
    first, second = run(pool, 2, split=[6, 2], micro_batch=6, fault=(1, 0))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert relative_error(first, alone(without=0)) < 1e-12  # just as if nobody had made that step


def twice(rank: int, world_size: int, port: int, case: dict[str, Any]) -> str:
    """A loop that calls backward twice in a turn, or steps every other turn: the error that it ends with."""
    join_job(rank, world_size, port)
    model, optimizer, scheduler = parts()
    model, optimizer, loader = ev.prepare(
        model,
        optimizer,
        DataLoader(data(), batch_size=BATCH),
        scheduler=scheduler,
        batch_per_device=[6, 2],
        micro_batch=case["micro_batch"],
    )
    try:
        for turn, (x, y) in enumerate(loader):
            nn.functional.cross_entropy(model(x), y).backward()
            if case["mistake"] == "two backwards":
                nn.functional.cross_entropy(2 * model(x), y).backward()
            if case["mistake"] == "two backwards" or turn % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    except ev.EvenerError as e:
        dist.destroy_process_group()  # as the end of the process would, so that nobody waits for it
        return str(e)
    return ""


@pytest.mark.parametrize(
    ("mistake", "micro_batch", "told"),
    [("two backwards", None, "second backward"), ("every other turn", 2, "optimizer.step")],
    ids=["two backwards", "every other turn"],
)
def test_loops_that_would_let_devices_drift_apart_are_stopped(
    pool: Pool, mistake: str, micro_batch: int | None, told: str
) -> None:
    """Both once ended with exit code 0 and different parameters on the two devices."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said = pool.run(twice, 2, store.port, {"mistake": mistake, "micro_batch": micro_batch})
    assert any(told in text for text in said), said
