"""Rows of placed tables go from who has them to who is to have them, after the devices have changed.

    before   a 0..50  b 50..80  c 80..100          c leaves
    after    a 0..63  b 63..100                    b sends 50..63 to a, c 80..100 to b; a's and b's own stay

A row travels with its optimiser's state, as of the last step.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from evener.core.membership import Turn
from evener.core.ranges import Ranges
from evener.core.seams import Channel
from evener.runtime.tables.sharing import chunk_rows
from evener.runtime.tables.table import Table
from evener.session.meeting import FOREVER, Meeting

Piece = tuple[Table, str, str, int, int]
"""(table, from, to, first row, end)"""


def held_rows(tables: Sequence[Table]) -> dict[str, Ranges]:
    """The rows that this device could give to others, by table."""
    found = {t.name: tuple((p.start, p.stop) for p in t.held) for t in tables}
    return {name: ranges for name, ranges in found.items() if ranges}


def pieces(tables: Sequence[Table], turn: Turn, used: Sequence[str]) -> Iterator[Piece]:
    """What goes where, in an order in which all devices can send and receive."""
    placed = {p.table: p.rows for p in turn.plan.tables}
    for table in tables:
        bounds = (0, *accumulate(placed[table.name].get(d, 0) for d in used))
        step = chunk_rows(table.dim * table.dtype.itemsize)
        for held in turn.rows[table.name]:
            for device, (start, stop) in zip(used, pairwise(bounds), strict=True):
                low, high = max(start, held.start), min(stop, held.stop)
                for first in range(low, high, step):
                    yield table, held.device, device, first, min(high, first + step)


def move_rows(
    tables: Sequence[Table], turn: Turn, used: Sequence[str], here: str, channel: Channel, room: Meeting
) -> None:
    """Bring every row to its place; called by all devices of `turn` together.

    Returns when all rows are there everywhere: until then who leaves may still be needed.
    """
    for table in tables:
        if here not in used and table.optimizer is not None:
            table.catch_up()  # who is to have rows has done so
        if here == turn.rows[table.name][0].device:
            room.put(f"rows/{table.name}", len(table.rates.values))
    for table, source, target, first, last in pieces(tables, turn, used):
        key = f"rows {first} of {table.name[-120:]}"
        if here == source == target:
            _put(table, first, _read(table, first, last))
        elif here == source:
            channel.send((_read(table, first, last),), target, key).wait()
        elif here == target:
            _put(table, first, channel.receive(source, key, device="cpu").wait()[0])
    for table in tables if here in used else ():
        table.rates.restore(np.zeros(room.get(f"rows/{table.name}", int)))
        table.is_whole = True
    if tables and here in used:
        room.put(f"rows of {here}", True)
    for device in used if tables else ():
        room.get(f"rows of {device}", bool, timeout=FOREVER)


def _read(table: Table, first: int, last: int) -> Tensor:
    part = next(p for p in table.held if p.start <= first and last <= p.stop)
    columns = [c[first - part.start : last - part.start] for c in part.rows.columns.values()]
    return torch.cat(columns, 1).cpu()


def _put(table: Table, first: int, records: Tensor) -> None:
    start, columns = table.part.start, table.part.rows.columns
    parts = records.split([c.shape[1] for c in columns.values()], 1)
    for column, values in zip(columns.values(), parts, strict=True):
        column[first - start : first - start + len(values)].copy_(values)
