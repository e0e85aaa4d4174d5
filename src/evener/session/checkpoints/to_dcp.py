"""A checkpoint of evener as one of `torch.distributed.checkpoint` (DCP); names in `interchange`."""

import shutil
from functools import partial
from math import prod
from pathlib import Path

from torch import Tensor

from evener.errors import FileError, UsageError
from evener.runtime.checkpoints.dcp_writing import Entries, Lying, Stretch, write_dcp
from evener.runtime.checkpoints.folder import Checkpoint
from evener.runtime.checkpoints.rows import parts_of
from evener.runtime.checkpoints.shards import DTYPES, read_values
from evener.runtime.checkpoints.values import pieces_of
from evener.session.checkpoints.interchange import NUMBERS, ROOM, Done, Moved, adding, check_room
from evener.session.checkpoints.saved import chosen
from evener.session.checkpoints.state import read_state


def export_dcp(path: str | Path, target: str | Path, done: Done = lambda *_: None) -> Moved:
    """Write model and optimiser state of a checkpoint, or of a run's newest good one, as a DCP checkpoint.

    Tied tensors stand under each of their names, as torch has them. Options of parameter groups are a
    recipe's and not in it. UsageError where `target` exists, FileError where it cannot be written or has too
    little room; nothing is left there then.
    """
    target = Path(target)
    if target.exists():
        raise UsageError(f"{target} exists and is not written over", remedy="the name of a new folder")
    checkpoint = chosen(path)
    entries = _entries(checkpoint)
    lying = [entry for entry in entries.values() if isinstance(entry, Lying)]
    total = sum(entry.num_bytes for entry in lying)
    try:
        target.mkdir(parents=True)
    except OSError as e:  # made by somebody else meanwhile: it is theirs, and stays
        raise FileError(f"cannot write {target}: {e}", remedy=ROOM) from e
    try:
        check_room(target, total, len(entries) + sum(len(entry.stretches) for entry in lying))
        write_dcp(target, entries, adding(done, total))
    except BaseException as e:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(e, OSError | RuntimeError):
            raise FileError(f"cannot write {target}: {e}", remedy=ROOM) from e
        raise
    beside = {name.partition("/")[0] for name in checkpoint.manifest.wholes} - {"model", "optimizer"}
    return Moved(
        source=str(checkpoint.path),
        to=str(target),
        num_tensors=len(lying),
        num_bytes=total,
        left=("position", *sorted(beside)),
    )


def _entries(checkpoint: Checkpoint) -> Entries:
    """Model and optimiser state under torch's names; values are read when they are asked for."""
    entries: dict[tuple[str, ...], Lying | bool | int | float] = {}
    for name, entry in _lying(checkpoint).items():
        kind, _, rest = name.partition("/")
        if kind == "model":
            entries["model", rest] = entry
        elif kind == "optimizer":
            parameter, _, key = rest.rpartition("/")
            word, _, number = key.partition(":")
            is_number = number in NUMBERS
            value = entry.stretches[0].read(0, 1).item() if is_number else entry
            entries["optim", "state", parameter, word] = value
    for name, first in checkpoint.manifest.tied.items():
        entries["model", name] = entries["model", first]
    return entries


def _lying(checkpoint: Checkpoint) -> dict[str, Lying]:
    """Every tensor of a checkpoint, in the stretches in which devices wrote it.

    BatchNorm's statistics that devices have of their own are their mean.
    """
    manifest = checkpoint.manifest
    shards = {name: shard for shard in manifest.shards for name in shard.tensors}
    rows, values = parts_of(manifest.tensors), pieces_of(manifest.tensors)
    dtypes = {word: dtype for dtype, word in DTYPES.items()}
    found = {}
    for name, info in manifest.wholes.items():
        row = prod(info.shape[1:]) if name in rows else 1
        held = rows.get(name) or values.get(name) or [(0, prod(info.shape), name)]
        stretches = [
            Stretch(start * row, stop * row, partial(read_values, checkpoint.path, shards[stored], stored))
            for start, stop, stored in held
        ]
        found[name] = Lying(dtypes[info.dtype], info.shape, stretches)
    apart = {name for shard in manifest.shards for name in shard.statistics}
    for name, mean in read_state(checkpoint, sorted(apart)).items():
        found[name] = _in_memory(mean)
    return found


def _in_memory(tensor: Tensor) -> Lying:
    values = tensor.reshape(-1)
    stretch = Stretch(0, values.numel(), lambda start, stop: values[start:stop])
    return Lying(tensor.dtype, tuple(tensor.shape), [stretch])
