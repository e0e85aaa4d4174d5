"""Small checkpoints for tests: two devices, one model of a few numbers, made without a job."""

from pathlib import Path

import torch
from torch import Tensor

from evener.runtime.checkpoints.files import Disk, Files
from evener.runtime.checkpoints.folder import FOLDER, partial_of
from evener.runtime.checkpoints.manifest import FORMAT, Manifest, Position, model_id
from evener.runtime.checkpoints.saving import Part, Saved, complete, write_part
from evener.runtime.checkpoints.shards import info_of


def tensors_at(samples_seen: int) -> dict[str, dict[str, Tensor]]:
    """By device, what a job has after so many samples."""
    x = float(samples_seen)
    return {
        "lab/a": {"model/w": torch.full((3, 2), x), "optimizer/w/step": torch.tensor(x)},
        "lab/b": {"model/b": torch.full((2,), -x, dtype=torch.float64)},
    }


def manifest_at(samples_seen: int, seed: int = 0) -> Manifest:
    every = {n: t for held in tensors_at(samples_seen).values() for n, t in held.items()}
    position = Position(
        step=samples_seen // 8, samples_seen=samples_seen, seed=seed, global_batch=8, dataset_size=100
    )
    return Manifest(
        format=FORMAT,
        number=0,
        position=position,
        optimizer="SGD",
        model_id=model_id({n: info_of(n, t) for n, t in every.items()}),
        shards=(),
    )


def save(
    run: Path, samples_seen: int, files: Files | None = None, *, keep_last: int = 3, seed: int = 0
) -> Saved:
    """Write a checkpoint as two devices would, one after the other."""
    files = files or Disk()
    partial = run / FOLDER / partial_of(samples_seen, "token")
    held = tensors_at(samples_seen)
    written = [
        write_part(
            files,
            Part(
                partial=partial,
                device=device,
                place=i + 1,
                places=len(held),
                copy=lambda device=device: held[device],
                statistics={},
            ),
        )
        for i, device in enumerate(held)
    ]
    return complete(files, partial, manifest_at(samples_seen, seed), written, keep_last=keep_last)
