"""A checkpoint of `torch.distributed.checkpoint` (DCP) as the first of a new run; names in `interchange`."""

import shutil
from collections.abc import Callable, Collection, Mapping
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from evener import __version__
from evener.core.words import some
from evener.errors import FileError, StateError, UsageError
from evener.runtime.checkpoints.dcp_reading import (
    METADATA,
    Stored,
    read_metadata,
    read_number,
    read_part,
    read_tensor,
)
from evener.runtime.checkpoints.files import Disk
from evener.runtime.checkpoints.folder import FOLDER, commit, partial_of
from evener.runtime.checkpoints.manifest import FORMAT, Manifest, Position, model_id
from evener.runtime.checkpoints.rows import part_name, wholes
from evener.runtime.checkpoints.shards import Later, info_of, write_shard
from evener.runtime.checkpoints.values import joined, piece_name
from evener.session.checkpoints.interchange import NUMBERS, ROOM, Done, Moved, adding, check_room
from evener.session.checkpoints.optimizer_class import check_class
from evener.session.checkpoints.resume import check_folder

MODELS = ("model", "app.model", "state_dict", "")
OPTIMIZERS = ("optim", "optimizer", "app.optim", "app.optimizer", "optimizer_0")
"""Where others put model and optimiser; torchtitan has the model's names beside `optimizer`."""

_BESIDE = ("train_state.", "lr_scheduler.", "dataloader.")


def import_dcp(
    source: str | Path, run: str | Path, optimizer: str | None = None, done: Done = lambda *_: None
) -> Moved:
    """Make the DCP checkpoint `source` the first checkpoint of the new run `run`: before its first sample.

    `optimizer` is the class that its state is of, which it does not say itself. Nothing in it is run, see
    `runtime.checkpoints.dcp_reading`. UsageError where `run` holds another run or `optimizer` is missing or
    another class, StateError where `source` is damaged, holds what is not admitted, or has other names than
    those that are known, FileError where there is too little room; nothing is left then.
    """
    source, run = Path(source), Path(run)
    if not (source / METADATA).is_file():
        raise UsageError(
            f"{source} has no {METADATA}: it is no checkpoint of torch.distributed.checkpoint, or unfinished",
            remedy="the folder that was given to its save; --weights takes safetensors files",
        )
    check_folder(run, None)
    names, left = _names(source, read_metadata(source))
    note = _check_optimizer(names, optimizer)
    total = sum(entry.num_bytes for entry in names.values() if isinstance(entry, Stored))
    tensors = _to_write(source, names, adding(done, total))
    files, folder = Disk(), run / FOLDER
    unfinished = folder / partial_of(0, "imported")
    try:
        files.remove(unfinished)
        files.make_folder(unfinished)
        check_room(unfinished, total, len(tensors))
        shard = write_shard(files, unfinished / "shard-00001-of-00001.safetensors", tensors, "imported")
        manifest = Manifest(
            format=FORMAT,
            number=1,
            position=Position(step=0, samples_seen=0, seed=0, global_batch=0, dataset_size=0),
            optimizer=optimizer or "",
            model_id=model_id(joined(wholes(shard.tensors))),
            shards=(shard,),
            written_by=f"evener {__version__}, from torch.distributed.checkpoint",
        )
        made = commit(files, unfinished, manifest)
    except BaseException as e:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(e, OSError):
            raise FileError(f"cannot write {folder}: {e}", remedy=ROOM) from e
        raise
    return Moved(
        source=str(source), to=str(made), num_tensors=len(names), num_bytes=total, left=left, note=note
    )


def _names(source: Path, stored: Mapping[str, Stored]) -> tuple[dict[str, Stored | Tensor], tuple[str, ...]]:
    """(by evener's name what the DCP checkpoint has, where its entries are that have no place here)."""
    keys = [key for key in OPTIMIZERS if any(name.startswith(f"{key}.state.") for name in stored)]
    if len(keys) > 1:
        raise StateError(f"{source} holds several optimisers", numbers=", ".join(keys))
    head = f"{keys[0]}." if keys else "\0"
    state = [name for name in stored if name.startswith(f"{head}state.")]
    words = {name: name.removeprefix(f"{head}state.").rpartition(".") for name in state}
    tensors = [name for name, s in stored.items() if s.dtype and not name.startswith((head, *_BESIDE))]
    before = _before_model(source, tensors, {parameter for parameter, _, _ in words.values()})
    mine = [name for name in tensors if name.startswith(before)]
    bad = [name for name in (*mine, *state) if "/" in name or ":" in name.rpartition(".")[2]]
    if bad:
        raise StateError(f"{source} has names that a checkpoint cannot hold", numbers=some(bad, 4))
    found: dict[str, Stored | Tensor] = {f"model/{n.removeprefix(before)}": stored[n] for n in mine}
    for name, (parameter, _, key) in words.items():
        entry = stored[name]
        if entry.dtype:
            found[f"optimizer/{parameter}/{key}"] = entry
        elif (number := read_number(source, entry)) is not None:
            kind = type(number).__name__
            found[f"optimizer/{parameter}/{key}:{kind}"] = torch.tensor(number, dtype=NUMBERS[kind])
    taken = {*mine, *state}
    left = {".".join(n.split(".")[: 3 if n.startswith("app.") else 2]) for n in stored if n not in taken}
    return found, tuple(sorted(left))


def _before_model(source: Path, tensors: Collection[str], parameters: Collection[str]) -> str:
    """What stands before the model's names: so that all `parameters` of the optimiser are among `tensors`."""
    there = set(tensors)
    for key in MODELS if there else ():
        before = f"{key}." if key else ""
        if parameters and all(before + name in there for name in parameters):
            return before
        if not parameters and all(name.startswith(before) for name in tensors):
            return before
    raise StateError(
        f"{source} has no model under names that are known, or an optimiser's state of other parameters",
        numbers=some(sorted(there), 8),
        remedy='one that was saved as {"model": …, "optim": …} of torch\'s get_state_dict',
    )


def _check_optimizer(names: Collection[str], optimizer: str | None) -> str:
    words = sorted(
        {name.rpartition("/")[2].partition(":")[0] for name in names if name.startswith("optimizer/")}
    )
    if words and not optimizer:
        raise UsageError(
            "the class of the optimiser is needed, as its state does not say it",
            numbers=f"it keeps {some(words, 8)}",
            remedy="--optimizer AdamW, or whatever the recipe's is called",
        )
    if optimizer and not words:
        raise UsageError("there is no optimiser's state to be of a class", remedy="no --optimizer")
    return check_class(optimizer, words) if optimizer else ""


def _to_write(
    source: Path, names: Mapping[str, Stored | Tensor], add: Callable[[int], None]
) -> dict[str, Tensor | Later]:
    """What the new checkpoint holds: tensors of several parts in rows or pieces, where values follow in each.

    Rows can be read one by one, as a table wants them.
    """
    found: dict[str, Tensor | Later] = {}

    def later(name: str, entry: Stored, shape: tuple[int, ...], read: Callable[[], Tensor]) -> None:
        def counted() -> Tensor:
            values = read()
            add(values.nbytes)
            return values

        found[name] = Later(torch.empty(shape, dtype=entry.dtype, device="meta"), counted)

    for name, entry in names.items():
        if isinstance(entry, Tensor):
            found[name] = entry
            continue
        pieces = [(part, s) for part in entry.parts if (s := part.stretch_in(entry.shape))]
        if len(entry.parts) == 1 or len(pieces) < len(entry.parts) or not entry.num_bytes:
            later(name, entry, entry.shape, partial(read_tensor, source, entry))
            continue
        row = prod(entry.shape[1:])
        in_rows = all(start % row == stop % row == 0 for _, (start, stop) in pieces)
        for part, (start, stop) in pieces:
            piece = piece_name(name, entry.shape, start, stop)
            piece = part_name(name, start // row, stop // row) if in_rows else piece
            shape = part.sizes if in_rows else (stop - start,)
            later(piece, entry, shape, partial(read_part, source, entry, part))
    infos = {name: info_of(name, t.like if isinstance(t, Later) else t) for name, t in found.items()}
    joined(wholes(infos))  # StateError where parts overlap
    return found
