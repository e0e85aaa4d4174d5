"""A table's rows and state as a checkpoint holds them: under the names that torch's optimiser would give.

Rows are brought up to the last step before they are saved, so that no learning rate of the past is needed.
Those of a tiered table are read from its file, piece by piece, while the checkpoint is written: its last
commit stays what it is until then, and what the training changes goes to the log and is no part of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from evener.errors import StateError
from evener.runtime.checkpoints.folder import Checkpoint
from evener.runtime.checkpoints.rows import part_name
from evener.runtime.checkpoints.shards import Later
from evener.runtime.tables.optimizers import SEEN, TableAdagrad, TableAdam
from evener.runtime.tables.rows import WEIGHT, SomeRows
from evener.runtime.tables.sharing import chunk_rows
from evener.runtime.tables.table import Table
from evener.runtime.tables.tiered import TieredRows

_CAUGHT_UP_AT_ONCE = 4096  # of copies, beside the training
_NAMES = {"mean": "exp_avg", "square": "exp_avg_sq", "sum": "sum"}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What a checkpoint has of this device's rows. `later` is as it is until `release`.

    `spared` are bytes by folder that the training needs there meanwhile.
    """

    tensors: dict[str, Tensor]
    later: dict[str, Later] = field(default_factory=dict)
    spared: dict[Path, int] = field(default_factory=dict)
    release: Callable[[], None] = lambda: None


def export_table(table: Table, *, leads: bool) -> Exported:
    """This device's rows and their state, in memory as references; the number of steps where it `leads`.

    Example: rows 0 to 5 of "emb" under Adam give rows/model/emb.weight/0-5, and exp_avg, exp_avg_sq of them.
    """
    rows, part, optimizer = table.part.rows, table.part, table.optimizer
    assert optimizer is not None
    found = {}
    if leads and isinstance(optimizer, TableAdam | TableAdagrad):
        key, step = f"optimizer/{table.name}.weight/step", len(table.rates.values)
        sparse = isinstance(optimizer, TableAdam) and optimizer.meaning == "touched"
        found[f"{key}:int" if sparse else key] = torch.tensor(step if sparse else float(step))
    if part.start == part.stop:
        return Exported(tensors=found)
    if isinstance(rows, TieredRows):
        frozen = _Frozen(table, rows)
        spared = {rows.file.folder: rows.log_bytes}
        return Exported(tensors=found, later=frozen.pieces(), spared=spared, release=frozen.release)
    table.catch_up()
    for column, whole in _wholes(table).items():
        found[part_name(whole, part.start, part.stop)] = _kept(table, column, rows.columns[column])
    return Exported(tensors=found)


class _Frozen:
    """The rows of a table in a file as of its last step, for the thread that writes them, until `release`."""

    def __init__(self, table: Table, rows: TieredRows) -> None:
        rows.commit()
        rows.file.reading.acquire()
        self._table, self._rows, self._rates = table, rows, table.rates.values
        self._read: tuple[int, dict[str, Tensor]] = (-1, {})
        self._over = False

    def pieces(self) -> dict[str, Later]:
        """Each piece's columns one after the other, so that the file is read once."""
        table, start = self._table, self._table.part.start
        record = sum(column.shape[1] for column in self._rows.columns.values()) * table.dtype.itemsize
        found = {}
        for first, last in _pieces(0, self._rows.num_rows, chunk_rows(record)):
            for column, whole in _wholes(table).items():
                shape = (last - first, self._rows.columns[column].shape[1])
                like = torch.empty(shape, dtype=table.dtype, device="meta")
                read = partial(self._column, column, first, last)
                found[part_name(whole, start + first, start + last)] = Later(like, read)
        return found

    def release(self) -> None:
        """Let the table commit again; what is asked for after that is refused."""
        self._over, self._read = True, (-1, {})
        self._rows.file.reading.release()

    def _column(self, column: str, first: int, last: int) -> Tensor:
        if self._over:
            raise StateError(f"the table {self._table.name} is no longer what the checkpoint was to have")
        if self._read[0] != first:
            self._read = (-1, {})  # let go of the former piece first
            self._read = (first, self._columns(first, last))
        return self._read[1][column]

    def _columns(self, start: int, stop: int) -> dict[str, Tensor]:
        """What is kept of a whole piece, brought up to date a few rows at a time: they stay in the cache."""
        table, columns, wholes = self._table, self._rows.columns, _wholes(self._table)
        assert table.optimizer is not None
        found = {c: torch.empty(stop - start, columns[c].shape[1], dtype=table.dtype) for c in wholes}
        for first, last in _pieces(start, stop, _CAUGHT_UP_AT_ONCE):
            some = SomeRows(self._rows.committed(first, last))
            table.optimizer.catch_up(some, torch.arange(last - first), self._rates)  # type: ignore[arg-type]
            for name, whole in found.items():
                whole[first - start : last - start] = _kept(table, name, some.columns[name])
        return found


def import_table(table: Table, checkpoint: Checkpoint) -> None:
    """Make this device's rows and their state what `checkpoint` says, whoever wrote it, in parts or whole.

    Without state of any kind there the table begins as a new one with these rows. StateError where some is
    missing; nothing has changed then.
    """
    there, wanted = checkpoint.manifest.wholes, _wholes(table)
    state = {column: whole for column, whole in wanted.items() if column != WEIGHT}
    missing = [name for name in state.values() if name not in there]
    if missing and len(missing) < len(state):
        raise StateError(
            f"the checkpoint {checkpoint.path} has not all of the state of the table {table.name}",
            numbers=f"missing: {', '.join(missing)}",
            remedy="the optimiser that it was made with",
        )
    done = 0 if missing or not state else _steps(table, checkpoint)
    given = {WEIGHT: wanted[WEIGHT]} if missing else wanted
    table.part.rows.refill(_given(table, checkpoint, given, done), done)
    table.rates.restore(np.zeros(done))


def _given(
    table: Table, checkpoint: Checkpoint, wanted: dict[str, str], done: int
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """This device's rows piece by piece, as of step number `done`; zeros in columns that are not `wanted`."""
    start, columns = table.part.start, table.part.rows.columns
    record = sum(column.shape[1] for column in columns.values()) * table.dtype.itemsize
    initial = table.optimizer.initial if isinstance(table.optimizer, TableAdagrad) else 0.0
    for first, last in _pieces(start, table.part.stop, chunk_rows(record)):
        piece = {}
        for name, column in columns.items():
            if name in wanted:
                came = checkpoint.read_rows(wanted[name], first, last).to(table.dtype)
                piece[name] = came - initial if initial and name == "sum" else came
            else:
                value = float(done) if name == SEEN else 0.0
                piece[name] = torch.full((last - first, column.shape[1]), value, dtype=table.dtype)
        yield first - start, piece


def _pieces(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, step):
        yield first, min(stop, first + step)


def _steps(table: Table, checkpoint: Checkpoint) -> int:
    """The steps that the state of a table is of; StateError where the checkpoint does not say."""
    key = f"optimizer/{table.name}.weight/step"
    kept = [k for k in (key, f"{key}:int") if k in checkpoint.manifest.tensors]
    if not kept:
        raise StateError(
            f"the checkpoint {checkpoint.path} does not say after how many steps the table {table.name} is",
            numbers=f"missing: {key}",
            remedy="another checkpoint: the averages of Adam and Adagrad mean nothing without it",
        )
    return int(checkpoint.read(kept)[kept[0]])


def _wholes(table: Table) -> dict[str, str]:
    """By column that is kept, the name of the tensor that it is rows of."""
    row_wise = isinstance(table.optimizer, TableAdagrad) and table.optimizer.row_wise
    names = _NAMES | {"sum": "row_sum"} if row_wise else _NAMES
    state = {c: f"optimizer/{table.name}.weight/{names[c]}" for c in table.part.rows.columns if c in names}
    return {WEIGHT: f"model/{table.name}.weight"} | state


def _kept(table: Table, column: str, tensor: Tensor) -> Tensor:
    """torch counts what Adagrad's sums begin with among them."""
    initial = table.optimizer.initial if isinstance(table.optimizer, TableAdagrad) else 0.0
    return tensor + initial if initial and column == "sum" else tensor
