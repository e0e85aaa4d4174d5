"""State in parts over real processes: K17 of the cases, files for other owners, and a lost one."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from evener.runtime.checkpoints.files import Disk
from evener.runtime.checkpoints.folder import Checkpoint
from evener.runtime.checkpoints.manifest import FORMAT, Manifest, Position, model_id
from evener.runtime.checkpoints.saving import Part, complete, write_part
from evener.runtime.owning.post import GroupPost
from evener.runtime.owning.state import export_owned, import_owned
from evener.runtime.wire import GroupWire, SoloWire
from evener.session.sockets import shut_sockets
from tests.local.pool import Pool
from tests.owning import Device, Job, on_one
from tests.reference import relative_error


def ten_rows() -> nn.Module:
    """What is cut is the dimension of 10: rows 0 to 4, 5 to 7, 8 and 9."""
    return nn.Sequential(nn.Linear(6, 10, bias=False), nn.Tanh(), nn.Linear(10, 6, bias=False))


def job_of(parts: tuple[int, ...], held: str) -> Job:
    micro_batches = {3: ((5, 5), (3, 3), (2, 2)), 2: ((6, 3), (4, 2)), 1: ((10, 5),)}[len(parts)]
    return Job(parts=parts, micro_batches=micro_batches, held=held, make_model=ten_rows)  # type: ignore[arg-type]


def opened(rank: int, world_size: int, job: Job) -> Device:
    wire = GroupWire() if world_size > 1 else SoloWire()
    return Device(job, job.names[rank], GroupPost(dist.group.WORLD, job.names), wire)


def trained(rank: int, world_size: int, job: Job, folder: str) -> list[torch.Tensor]:
    """Three steps, then its part into the checkpoint at `folder`; all parameters."""
    device = opened(rank, world_size, job)
    for number, batch in enumerate(job.batches()):
        device.step(number, batch)
    save(device, rank, world_size, Path(folder))
    whole = device.whole()
    device.executor.close()
    return whole


def passed_on(rank: int, world_size: int, job: Job, source: str, folder: str) -> None:
    """What one checkpoint has, taken by other owners, and into another."""
    device = opened(rank, world_size, job)
    checkpoint = Checkpoint(Path(source))
    names = list(checkpoint.manifest.wholes)
    import_owned(
        device.owned,
        lambda wanted: checkpoint.read([n for n in names if n.split("/")[1] in wanted]),
    )
    save(device, rank, world_size, Path(folder))
    device.executor.close()


def save(device: Device, rank: int, world_size: int, folder: Path) -> None:
    tensors = export_owned(device.owned)
    part = Part(
        partial=folder,
        device=device.here,
        place=rank + 1,
        places=world_size,
        copy=lambda: {n: t.clone() for n, t in tensors.items()},
        statistics={},
    )
    written = [write_part(Disk(), part)]
    if world_size > 1:
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, written[0])
        written = everyone
    if rank == 0:
        manifest = Manifest(
            format=FORMAT,
            number=0,
            position=Position(step=3, samples_seen=30, seed=0, global_batch=10, dataset_size=30),
            optimizer="AdamW",
            model_id=model_id({}),
            shards=(),
        )
        saved = complete(Disk(), folder, manifest, written, keep_last=9)
        assert saved.path is not None, saved.why
        saved.path.rename(folder)
    if world_size > 1:
        dist.barrier()


@pytest.mark.parametrize("held", ["optimizer", "parameters"])
def test_5_3_2_of_10_over_three_processes_and_files_to_2_to_1_and_back(
    pool: Pool, tmp_path: Path, held: str
) -> None:
    three, two, one = job_of((5, 3, 2), held), job_of((1, 2), held), job_of((1,), held)
    folders = [tmp_path / name / "x" for name in "abcd"]
    want = on_one(three)
    for parameters in pool.run(trained, 3, three, str(folders[0]), timeout_s=90):
        assert relative_error(parameters, want.parameters) < 1e-6
    for job, source, target in zip((two, one, three), folders, folders[1:], strict=False):
        pool.run(passed_on, len(job.parts), job, str(source), str(target), timeout_s=90)
    first, *others = [Checkpoint(folder) for folder in folders]
    names = list(first.manifest.wholes)
    whole = first.read(names)
    assert {n: tuple(t.shape) for n, t in whole.items()}["optimizer/0.weight/exp_avg"] == (10, 6)
    for other in others:
        assert set(other.manifest.wholes) == set(names)
        assert all(torch.equal(t, whole[n]) for n, t in other.read(names).items())
    parts = [t for s in first.manifest.shards for t in s.tensors if t.startswith("values/model/0.weight")]
    assert sorted(parts) == [f"values/model/0.weight/10x6/{a}-{b}" for a, b in ((0, 30), (30, 48), (48, 60))]


def lost_in_mid_step(rank: int, world_size: int, job: Job) -> float:
    """Seconds until a survivor knows that the last process was killed in mid-backward."""
    device = opened(rank, world_size, job)
    batches = job.batches()
    device.step(0, batches[0])
    if rank == world_size - 1:
        device.model[2].register_full_backward_hook(  # type: ignore[index]
            lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        )
    start = time.monotonic()
    try:
        device.step(1, batches[1])
    except Exception as e:
        assert type(e).__name__ == "PeerLostError", e
        known_s = time.monotonic() - start
        # A process of a job ends here, and so does its end of the group: another survivor may wait for it.
        shut_sockets(lambda connection: True)
        return known_s
    raise AssertionError("the step ended without its third device")


@pytest.mark.parametrize("held", ["optimizer", "gradients", "parameters"])
def test_survivors_of_a_killed_owner_know_it_at_once(pool: Pool, held: str) -> None:
    outcomes = pool.outcomes(lost_in_mid_step, 3, job_of((5, 3, 2), held), timeout_s=60)
    assert "died" in outcomes[2].error
    assert all(o.ok and o.value < 5 for o in outcomes[:2]), [o.error for o in outcomes]
