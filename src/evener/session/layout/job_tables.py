"""The tables of a job on one device: its rows of each, fetched before a step and moved after it.

recipe.place ──► stand-ins in the model ──► rows by device ──► fetched before a step, moved after it
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from evener.core.files import readable
from evener.core.fleet import Fleet
from evener.core.plan import TablePlacement
from evener.core.records import TableRecord
from evener.errors import UsageError
from evener.planner.tables import CPU, DEVICE, too_large
from evener.runtime.reducers import Reducers
from evener.runtime.tables.ahead import Lookahead
from evener.runtime.tables.exchange import RowExchange
from evener.runtime.tables.finding import IdsOf
from evener.runtime.tables.layer import TableLayer, put_back, table_layers
from evener.runtime.tables.rows import MemoryRows
from evener.runtime.tables.sharing import MakeRows, bounds_of, fetch, gathered, in_memory, pieces, take_part
from evener.runtime.tables.sums import TableSums
from evener.runtime.tables.table import Part, Table
from evener.runtime.tables.tiered import TieredRows
from evener.runtime.tables.transfers import Lanes
from evener.session.layout.seat import Seat
from evener.session.layout.tables import TIERED, ids_found, optimizer_of, placements
from evener.session.recipe import Recipe
from evener.session.site import Site


@dataclass
class JobTables:
    """This device's tables; without any, all of it does nothing."""

    layers: list[TableLayer] = field(default_factory=list)
    here: list[TableLayer] = field(default_factory=list)
    exchange: RowExchange = field(default_factory=lambda: RowExchange(1))
    rank: int = 0
    ids_of: dict[str, IdsOf] = field(default_factory=dict)
    take_parts: Callable[[], None] = lambda: None
    notes: tuple[str, ...] = ()
    sums: TableSums | None = None
    lookahead: Lookahead | None = None
    lookups: dict[str, TableRecord] = field(default_factory=dict)
    _waiting: deque[Any] = field(default_factory=deque)
    _found_before: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def tables(self) -> list[Table]:
        """Each table once, whatever layers look it up."""
        return list({id(x.table): x.table for x in self.layers}.values())

    def join(self, reducers: Reducers, here: list[nn.Module]) -> None:
        """Take this device's parts, and part in the sums of steps; called by all devices together.

        `here` is what this device runs: it fetches for tables in it.
        """
        if self.layers:
            self.take_parts()
            self.sums = TableSums(self.layers)
            reducers.add_tables(self.sums, self.exchange.world_size)
            inside = {id(m) for module in here for m in module.modules()}
            self.here = [x for x in self.layers if id(x) in inside]

    def follow(self, recipe: Recipe, optimizer: torch.optim.Optimizer) -> None:
        """Give each table its optimiser; from now on they move when `optimizer` does."""
        if self.sums is None:
            return
        for table in self.sums.tables:
            table.use(optimizer_of(recipe, table.name, optimizer))
        self.sums.follow(optimizer)

    def look_ahead(self, device: torch.device) -> Lookahead | None:
        """What sends rows to this accelerator before they are asked for; `join` was called."""
        if self.sums is not None and device.type != "cpu":
            self.lookahead = Lookahead(self.here, self.ids_of, Lanes(device), self.sums.rate_of)
            self.sums.moved = self.lookahead.settle
        return self.lookahead

    def ahead(self, read: Callable[[], Any], count: int, *, last: bool = False) -> Callable[[int, int], Any]:
        """What gives the step's micro-batches one by one: `count` are read now, and their rows fetched.

        Called by all devices together. One device by itself reads one micro-batch ahead where rows are sent
        ahead, also one of the next step unless this is the `last`; otherwise nothing before its turn.
        """
        if self.sums is None or (self.exchange.world_size == 1 and self.lookahead is None):
            return lambda stage, micro_batch: read()
        if self.exchange.world_size == 1:
            return self._one_ahead(read, count, last=last)
        batches = deque(read() for _ in range(count))
        self._fetch(list(batches))

        def give(stage: int, micro_batch: int) -> Any:
            batch = batches.popleft()
            if self.lookahead is not None:
                self.lookahead.expect(batches[0] if batches else None, beyond=False)
            return batch

        return give

    def _one_ahead(self, read: Callable[[], Any], count: int, *, last: bool) -> Callable[[int, int], Any]:
        assert self.lookahead is not None
        lookahead, waiting, left = self.lookahead, self._waiting, count

        def give(stage: int, micro_batch: int) -> Any:
            nonlocal left
            left -= 1
            batch = waiting.popleft() if waiting else read()
            if left or not last:
                waiting.append(read())
            lookahead.expect(waiting[0] if waiting else None, beyond=not left)
            return batch

        return give

    def looked_up(self, here: str, *, counts: bool = True) -> dict[str, TableRecord]:
        """What this device looked up since the last call, by table; what `counts` adds up in `lookups`."""
        told = {}
        for table in self.sums.tables if self.sums else ():
            found, before = table.part.rows.found_in, self._found_before.get(table.name, {})
            self._found_before[table.name] = found
            told[table.name] = TableRecord(
                device=here,
                ids=table.ids_asked,
                rows=table.rows_asked,
                found_in={name: number - before.get(name, 0) for name, number in found.items()},
            )
            table.ids_asked = table.rows_asked = 0
        for name, new in told.items() if counts else ():
            self.lookups[name] = self.lookups[name].plus(new) if name in self.lookups else new
        return told

    def forget(self) -> None:
        """What was read ahead belongs to shares that no longer hold."""
        self._waiting.clear()
        if self.lookahead is not None:
            self.lookahead.forget()

    def held_out(
        self, read: Callable[[int, int], Any], keys: Sequence[tuple[int, int]]
    ) -> Callable[[int, int], Any]:
        """As `ahead`, for held-out samples: `keys` are the (stage, micro-batch) that this device reads."""
        if self.sums is None or self.exchange.world_size == 1:
            return read
        batches = {key: read(*key) for key in keys}
        self._fetch(list(batches.values()))
        return lambda stage, micro_batch: batches.pop((stage, micro_batch))

    def _fetch(self, batches: list[Any]) -> None:
        assert self.sums is not None
        wanted = {x.table.name for x in self.here}
        ids_of: Mapping[str, IdsOf] = {n: f if n in wanted else _nothing for n, f in self.ids_of.items()}
        fetch(self.sums.tables, ids_of, batches, self.exchange)

    def put_back(self, model: nn.Module, folder: Path) -> None:
        """The user's own layers, with the trained rows on the leading device; called by all together.

        A table that was never made in one piece stays in pieces: every device writes its rows into `folder`,
        and the layer stays without a weight. The file of a tiered table has all rows as of the run's end.
        """
        for layer in self.layers:
            if layer.replaced.weight.is_meta:
                save_part(layer.table, folder)
                put_back(model, layer, None)
            else:
                put_back(model, layer, gathered(layer.table, self.rank, self.exchange))
            layer.table.part.rows.commit()

    def dense_gradients(self) -> dict[str, Tensor]:
        """Each table's gradient of this step under its parameter's name, zeros in rows held elsewhere."""
        found = {}
        for table in self.sums.tables if self.sums else ():
            if table.gradient is not None:
                whole = torch.zeros(table.num_rows, table.dim, dtype=table.dtype)
                ids, rows = table.gradient
                whole[ids + table.part.start] = rows
                if self.exchange.world_size > 1:
                    self.exchange.summed(whole)
                found[f"{table.name}.weight"] = whole
        return found


def open_tables(seat: Seat) -> JobTables:
    """The tables of the recipe's model, which is still whole and on the CPU; `join` then shares them out.

    Called by all devices of the plan together. `join` raises NoPlanFitsError where their memory has no room
    for a table.
    """
    recipe, ranks, site = seat.recipe, seat.ranks, seat.site
    layers = table_layers(recipe.model)
    if not layers:
        return JobTables()
    several = ranks.world_size > 1
    exchange = RowExchange(ranks.world_size, seat.new_group(ranks.devices) if several else None)
    far = site.torch_device.type != "cpu"
    ids_of, notes = ids_found(recipe, layers, must=several) if several or far else ({}, ())
    placed = placements(recipe, seat.plan, ranks.devices)

    def take_parts() -> None:
        for number, (layer, where) in enumerate(zip(layers, placed, strict=True)):
            table = layer.table
            bounds = bounds_of(table.name, table.num_rows, where.rows, ranks.devices)
            check_room(table, where, seat.fleet)
            make = _maker(where.residence or CPU, recipe, site, table.name)
            if seat.goes_on:
                start, stop = bounds[ranks.rank], bounds[ranks.rank + 1]
                part = Part(start, stop, make(stop - start, partial(_room, table)))
                table.share_anew(part, bounds, exchange)
                continue
            take_part(table, bounds, ranks.rank, exchange, make, seat.seed + number)

    return JobTables(
        layers=layers,
        exchange=exchange,
        rank=ranks.rank,
        ids_of=ids_of,
        take_parts=take_parts,
        notes=notes,
    )


def check_room(table: Table, where: TablePlacement, fleet: Fleet) -> None:
    """NoPlanFitsError where `table` is larger than all memory that it is to lie in, so far as that is known.

    The memory of an accelerator's host is that of the host's CPU, where the fleet has one.
    """
    if where.residence == TIERED:
        return
    holders = [fleet.device(name) for name, rows in where.rows.items() if rows]
    if where.residence != DEVICE:
        holders = [d if d.type == "cpu" else fleet.host_cpu(d.host) or d for d in holders]
    known = {d.name: d for d in holders if d.type == "cpu" or where.residence == DEVICE}
    room = {n: d.memory_bytes.value for n, d in known.items() if d.memory_bytes}
    num_bytes = table.num_rows * table.dim * table.dtype.itemsize
    if len(room) == len({d.name for d in holders}) and num_bytes > sum(room.values()):
        host = {} if where.residence == DEVICE else room
        raise too_large(table.name, table.num_rows, num_bytes, "of weights alone", room, host)


def _maker(residence: str, recipe: Recipe, site: Site, table: str) -> MakeRows:
    if residence == CPU:
        return in_memory
    if residence == DEVICE:
        return lambda num_rows, give: MemoryRows(give(0, num_rows).to(site.torch_device))
    if residence == TIERED:
        wish = recipe.places[table]
        folder = Path(wish["file"]) / f"{table}-{site.device.name.replace('/', '-')}"
        host, hot = int(wish["rows"]), int(wish.get("hot", 0))
        return lambda num_rows, give: TieredRows(
            folder, num_rows, give, host=host, hot=hot, device=site.torch_device
        )
    raise UsageError(
        f"place of {table} is {residence!r}",
        remedy='"cpu", "device", weights by device, or {"file": FOLDER, "rows": N}: N rows in memory',
    )


def save_part(table: Table, folder: Path) -> Path | None:
    """Write this device's rows as `table-NAME-FIRST-END.safetensors`; None where it has none."""
    start, stop = table.part.start, table.part.stop
    if start == stop:
        return None
    path = folder / f"table-{table.name}-{start}-{stop}.safetensors"
    save_file(
        {f"{table.name}.weight": torch.cat([rows for _, rows in pieces(table, start, stop, mine=True)])}, path
    )
    readable(path)
    return path


def _room(table: Table, first: int, last: int) -> Tensor:
    return torch.empty(last - first, table.dim, dtype=table.dtype)


def _nothing(batch: Any) -> Tensor:
    return torch.zeros(0, dtype=torch.int64)
