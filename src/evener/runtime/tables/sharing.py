"""Who holds which rows of a table, and how they get there and back."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from evener.errors import PlanMismatchError
from evener.runtime.tables.exchange import RowExchange
from evener.runtime.tables.rows import WEIGHT, MemoryRows, Rows, StandInRows, initial_rows
from evener.runtime.tables.table import Part, Table

CHUNK_BYTES = 64 * 2**20  # of a table, on its way at once
_BITS, _LEAST_BIT = 64, 2**18  # parts of a device's rows that are read off it in turn, and their least bytes

GiveRows = Callable[[int, int], Tensor]
MakeRows = Callable[[int, GiveRows], Rows]


def in_memory(num_rows: int, give: GiveRows) -> Rows:
    """A part's rows in the host's memory."""
    return MemoryRows(give(0, num_rows))


def bounds_of(table: str, num_rows: int, rows: Mapping[str, int], devices: Sequence[str]) -> tuple[int, ...]:
    """Where each device's part begins, and the end. PlanMismatchError unless the parts make up the table.

    Example: 10 rows as {"a": 5, "b": 3, "c": 2} give (0, 5, 8, 10).
    """
    strangers = [d for d in rows if d not in devices]
    if strangers or sum(rows.values()) != num_rows or min(rows.values(), default=0) < 0:
        raise PlanMismatchError(
            f"the parts of the table {table} are not those of its {num_rows} rows"
            + (f": {', '.join(strangers)} has no part in the plan" if strangers else ""),
            numbers=", ".join(f"{d} {n}" for d, n in rows.items()),
            remedy=f"rows of {', '.join(devices)} that sum to {num_rows}; --keep-all leaves no device out",
        )
    return (0, *accumulate(rows.get(d, 0) for d in devices))


def take_part(
    table: Table, bounds: tuple[int, ...], rank: int, exchange: RowExchange, make: MakeRows, seed: int
) -> None:
    """Hold rows bounds[rank] to bounds[rank + 1] of `table`, and no others; called by all devices together.

    A table that was made with the model is the group's first device's; one that was not is made part by part
    from `seed`, the same rows under any bounds. `make(num_rows, give)` places them; give(a, b) are some.
    """
    start, stop = bounds[rank], bounds[rank + 1]
    held, dtype = table.part.rows, table.dtype

    def new(first: int, last: int) -> Tensor:
        return initial_rows(start + first, start + last, table.dim, seed, dtype=dtype)

    if isinstance(held, StandInRows):
        rows = make(stop - start, new)
    elif exchange.world_size == 1:
        rows = make(stop - start, lambda first, last: held.columns[WEIGHT][first:last])
    else:
        mine = _slice_of_first(held.columns[WEIGHT], start, stop, exchange)
        rows = make(stop - start, lambda first, last: mine[first:last])
    table.share(Part(start, stop, rows), bounds, exchange)


def _slice_of_first(whole: Tensor, start: int, stop: int, exchange: RowExchange) -> Tensor:
    mine = torch.empty(stop - start, whole.shape[1], dtype=whole.dtype)
    step = chunk_rows(whole.shape[1] * whole.element_size())
    for first in range(0, len(whole), step):
        chunk = whole[first : first + step].contiguous()
        exchange.from_first(chunk)
        low, high = max(start, first), min(stop, first + len(chunk))
        if low < high:
            mine[low - start : high - start] = chunk[low - first : high - first]
    return mine


def gathered(table: Table, rank: int, exchange: RowExchange) -> Tensor | None:
    """The whole table on the group's first device, else None; called by all devices together."""
    leads = rank == 0
    whole = torch.empty(table.num_rows, table.dim, dtype=table.dtype) if leads else None
    for owner, (start, stop) in enumerate(pairwise(table.bounds)):
        for first, piece in pieces(table, start, stop, mine=owner == rank):
            exchange.to_first(piece, owner, here=rank)
            if whole is not None:
                whole[first : first + len(piece)] = piece
    return whole


def pieces(table: Table, start: int, stop: int, *, mine: bool) -> Any:
    """(first row, rows) of a part in chunks; where it is not `mine`, room for them."""
    step = chunk_rows(table.dim * torch.empty(0, dtype=table.dtype).element_size())
    for first in range(start, stop, step):
        last = min(stop, first + step)
        if mine:
            yield first, _read_in_bits(table, torch.arange(first - start, last - start))
        else:
            yield first, torch.empty(last - first, table.dim, dtype=table.dtype)


def _read_in_bits(table: Table, ids: Tensor) -> Tensor:
    """Rows of this device's part: from an accelerator few at a time, as a copy is made there of those."""
    if table.part.rows.columns[WEIGHT].device.type == "cpu":
        return table.own(ids)
    row_bytes = table.dim * table.dtype.itemsize
    bit = max(_LEAST_BIT, (table.part.stop - table.part.start) * row_bytes // _BITS)
    return torch.cat([table.own(piece) for piece in ids.split(max(1, bit // row_bytes))])


def chunk_rows(row_bytes: int) -> int:
    """Rows that make up about `CHUNK_BYTES`."""
    return max(1, CHUNK_BYTES // row_bytes)


def fetch(
    tables: Sequence[Table],
    ids_of: Mapping[str, Callable[[Any], Tensor]],
    batches: Sequence[Any],
    exchange: RowExchange,
) -> None:
    """Bring the rows that `batches` need of all `tables`; called by all devices of the group together."""
    wanted = []
    for table in tables:
        ids = [ids_of[table.name](b).reshape(-1) for b in batches]
        unique = torch.unique(torch.cat(ids)) if ids else torch.zeros(0)
        unique = unique.to(torch.int64)
        # What no table has is asked of nobody: the lookup itself says which sample it was.
        wanted.append(unique[(unique >= 0) & (unique < table.num_rows)])
    routes = exchange.routes(wanted, [t.bounds for t in tables])
    for table, unique, route in zip(tables, wanted, routes, strict=True):
        given = torch.zeros(0, table.dim, dtype=table.dtype)
        if len(route.ids_asked):
            given = table.own(route.ids_asked - table.part.start, looked_up=True)
        table.fetched(unique, exchange.rows_back(route, given), route)
