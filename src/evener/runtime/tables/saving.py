"""A table's rows and state as a checkpoint holds them: under the names that torch's optimiser would give.

Rows are brought up to the last step before they are saved, so that no learning rate of the past is needed.
"""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from evener.errors import StateError, UsageError
from evener.runtime.checkpoints.folder import Checkpoint
from evener.runtime.checkpoints.rows import part_name
from evener.runtime.tables.optimizers import SEEN, TableAdagrad, TableAdam
from evener.runtime.tables.rows import WEIGHT, MemoryRows
from evener.runtime.tables.table import Table

_AT_ONCE = 65_536  # rows that are brought up to date together
_NAMES = {"mean": "exp_avg", "square": "exp_avg_sq", "sum": "sum"}


def refuse_files(tables: list[Table]) -> None:
    """UsageError where a table lies in a file: it is its own, as of its own last step."""
    names = [t.name for t in tables if not isinstance(t.part.rows, MemoryRows)]
    if names:
        raise UsageError(
            f"checkpoints do not hold tables in files: {', '.join(names)}",
            remedy="no --checkpoint-every and no --resume with them; their folder keeps what a run ends with",
        )


def export_table(table: Table, *, leads: bool) -> dict[str, Tensor]:
    """This device's rows and their state, as references; the number of steps where this device `leads`.

    Example: rows 0 to 5 of "emb" under Adam give rows/model/emb.weight/0-5, and exp_avg, exp_avg_sq of them.
    """
    rows, part, optimizer = table.part.rows, table.part, table.optimizer
    assert optimizer is not None
    for first in range(0, part.stop - part.start, _AT_ONCE):
        some = torch.arange(first, min(part.stop - part.start, first + _AT_ONCE))
        optimizer.catch_up(rows, rows.slots(some), table.rates.values)
    found = {}
    if part.start < part.stop:
        for column, tensor in rows.columns.items():
            whole = _whole(table, column)
            if whole is not None:
                found[part_name(whole, part.start, part.stop)] = _kept(table, column, tensor)
    if leads and isinstance(optimizer, TableAdam | TableAdagrad):
        key, step = f"optimizer/{table.name}.weight/step", len(table.rates.values)
        sparse = isinstance(optimizer, TableAdam) and optimizer.meaning == "touched"
        found[f"{key}:int" if sparse else key] = torch.tensor(step if sparse else float(step))
    return found


def import_table(table: Table, checkpoint: Checkpoint) -> None:
    """Make this device's rows and their state what `checkpoint` says, whoever wrote it, in parts or whole.

    Without state of any kind there the table begins as a new one with these rows. StateError where some is
    missing.
    """
    rows, part, there = table.part.rows, table.part, checkpoint.manifest.wholes
    state = {c: w for c in rows.columns if c != WEIGHT and (w := _whole(table, c)) is not None}
    missing = [name for name in state.values() if name not in there]
    if missing and len(missing) < len(state):
        raise StateError(
            f"the checkpoint {checkpoint.path} has not all of the state of the table {table.name}",
            numbers=f"missing: {', '.join(missing)}",
            remedy="the optimiser that it was made with",
        )
    wanted = {WEIGHT: f"model/{table.name}.weight"} | ({} if missing else state)
    for first, stop in pairwise([*range(part.start, part.stop, _AT_ONCE), part.stop]):
        for column, whole in wanted.items():
            came = _given(table, column, checkpoint.read_rows(whole, first, stop))
            rows.columns[column][first - part.start : stop - part.start].copy_(came)
    done = 0 if missing or not state else _steps(table, checkpoint)
    if SEEN in rows.columns:
        rows.columns[SEEN].fill_(float(done))
    table.rates.restore(np.zeros(done))


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


def _whole(table: Table, column: str) -> str | None:
    """The name of the tensor that a column is rows of; None for what is not kept."""
    if column == WEIGHT:
        return f"model/{table.name}.weight"
    if column == SEEN:
        return None
    row_wise = isinstance(table.optimizer, TableAdagrad) and table.optimizer.row_wise
    return f"optimizer/{table.name}.weight/{'row_sum' if row_wise else _NAMES[column]}"


def _kept(table: Table, column: str, tensor: Tensor) -> Tensor:
    """torch counts what Adagrad's sums begin with among them."""
    initial = table.optimizer.initial if isinstance(table.optimizer, TableAdagrad) else 0.0
    return tensor + initial if initial and column == "sum" else tensor


def _given(table: Table, column: str, came: Tensor) -> Tensor:
    initial = table.optimizer.initial if isinstance(table.optimizer, TableAdagrad) else 0.0
    return came - initial if initial and column == "sum" else came
