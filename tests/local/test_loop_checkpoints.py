"""A loop over what `ev.prepare` gave is saved in its middle and taken up by another number of processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import evener as ev
from evener.core.order import epoch_order
from evener.runtime.checkpoints.folder import checkpoints_in
from tests.local.pool import Pool
from tests.local.test_drop_in import BATCH, data, join_job, parts
from tests.reference import relative_error

STEPS = 7  # two epochs have six: 22 samples in eights


def loop(
    model: nn.Module, optimizer: Any, loader: Any, scheduler: Any, *, stop: int, run: Path | None
) -> None:
    """Steps until `stop` were taken; saves at three, without stopping, and at the end."""
    while True:
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if not loader.at_boundary:
                with pytest.raises(ev.EvenerError, match="in the middle of a global batch"):
                    ev.save_checkpoint(run or ".", model, optimizer, loader)
                continue
            step = loader.position.step
            if run and step in (3, stop):
                ev.save_checkpoint(run, model, optimizer, loader, scheduler=scheduler, wait=step == stop)
                with pytest.raises(ev.EvenerError, match="another model or optimiser"):
                    ev.save_checkpoint(run, nn.Linear(1, 1), optimizer, loader)
            if step == stop:
                return


def in_job(rank: int, world_size: int, port: int, case: dict[str, Any]) -> list[torch.Tensor]:
    join_job(rank, world_size, port)
    model, optimizer, scheduler = parts()
    model, optimizer, loader = ev.prepare(
        model,
        optimizer,
        DataLoader(data(), batch_size=BATCH, shuffle=True),
        scheduler=scheduler,
        batch_per_device=case["split"],
        micro_batch=case.get("micro_batch"),
    )
    if case.get("load"):
        position = ev.load_checkpoint(case["load"], model, optimizer, loader, scheduler=scheduler)
        assert position.step == case["at"]
    loop(model, optimizer, loader, scheduler, stop=case["stop"], run=case.get("run"))
    return [p.detach().clone() for p in model.parameters()]


def run(pool: Pool, **case: Any) -> list[torch.Tensor]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = pool.run(in_job, len(case["split"]), store.port, case)
    assert all(torch.equal(a, b) for other in found for a, b in zip(found[0], other, strict=True))
    return found[0]


def test_three_processes_go_on_from_two_and_one_from_three(pool: Pool, tmp_path: Path) -> None:
    """Across the ends of epochs; parameters in float64 are those of the loop that was never left."""
    expected = run(pool, split=[6, 2], stop=STEPS)
    run(pool, split=[6, 2], micro_batch=3, stop=4, run=tmp_path)
    assert [c.manifest.position.samples_seen for c in checkpoints_in(tmp_path)] == [30, 22]
    assert len(checkpoints_in(tmp_path)[0].manifest.shards) == 2
    run(pool, split=[3, 3, 2], stop=6, run=tmp_path, load=tmp_path, at=4)
    found = run(pool, split=[8], stop=STEPS, load=tmp_path, at=6)
    assert relative_error(found, expected) < 1e-12
    middle = checkpoints_in(tmp_path)[-1].path
    assert relative_error(run(pool, split=[5, 3], stop=STEPS, load=middle, at=3), expected) < 1e-12


def test_plain_pytorch_takes_it_up(pool: Pool, tmp_path: Path) -> None:
    run(pool, split=[6, 2], stop=2, run=tmp_path)
    expected = run(pool, split=[6, 2], stop=3)
    model, optimizer, scheduler = parts()
    position = ev.load_checkpoint(tmp_path, model, optimizer, scheduler=scheduler)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01) and scheduler.last_epoch == 2
    order = epoch_order(position.dataset_size, 0, position.seed)
    samples = [data()[i] for i in order[position.samples_seen : position.samples_seen + BATCH]]
    x, y = (torch.stack(column) for column in zip(*samples, strict=True))
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert relative_error([p.detach() for p in model.parameters()], expected) < 1e-12
