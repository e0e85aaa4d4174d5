"""The tables of a job: which layers of the recipe's model are placed, who holds their rows, what steps fetch.

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

from evener.core.fleet import Fleet
from evener.core.plan import Plan, TablePlacement
from evener.core.records import TableRecord
from evener.core.split import apportion
from evener.errors import ModelError, UsageError
from evener.planner.tables import CPU, DENSE, DEVICE, too_large
from evener.runtime.reducers import Reducers
from evener.runtime.tables.ahead import Lookahead
from evener.runtime.tables.exchange import Exchange
from evener.runtime.tables.finding import IdsOf, find_ids, ids_asked
from evener.runtime.tables.layer import TableLayer, place_table, put_back, table_layers
from evener.runtime.tables.optimizers import TableOptimizer, like_torch
from evener.runtime.tables.rows import MemoryRows
from evener.runtime.tables.sharing import MakeRows, bounds_of, fetch, gathered, in_memory, pieces, take_part
from evener.runtime.tables.sums import TableSums
from evener.runtime.tables.table import Part, Table
from evener.runtime.tables.tiered import TieredRows
from evener.runtime.tables.transfers import Lanes
from evener.session.layout.seat import Seat
from evener.session.recipe import ALL_TABLES, LOSS_PLACE, Recipe
from evener.session.site import Site

TIERED = "tiered"
_WATCHED_SAMPLES = 8  # of a batch in which a table's ids are looked for


def table_names(recipe: Recipe) -> tuple[str, ...]:
    """The layers whose tables the recipe places apart from the devices that compute."""
    places = recipe.places.items()
    return tuple(name for name, where in places if name not in (LOSS_PLACE, ALL_TABLES) and where != DENSE)


def place_tables(recipe: Recipe) -> None:
    """Put stand-ins into the recipe's model; each has its whole table, in this process's memory."""
    for name in table_names(recipe):
        place_table(recipe.model, name)


def tables_of(model: nn.Module) -> list[Table]:
    """The placed tables, each once, whatever layers look it up."""
    return list({id(layer.table): layer.table for layer in table_layers(model)}.values())


def residence_of(recipe: Recipe, table: str) -> str:
    """The kind of memory that the recipe has the rows of `table` in."""
    wish = recipe.places[table]
    if isinstance(wish, str):
        return wish
    return TIERED if "file" in wish else CPU


def in_files(recipe: Recipe) -> bool:
    """Whether some table's rows are in files, which are a device's own."""
    return any(residence_of(recipe, table) == TIERED for table in table_names(recipe))


def tables_end(recipe: Recipe) -> str:
    """Which changes of devices end a job that places tables."""
    if in_files(recipe):
        return "tables are in files: the job ends when a device is lost or leaves, and none may join"
    return "tables are placed: the job ends when a device with rows of them is lost"


def take_out(model: nn.Module) -> None:
    """The user's own layers, as they are: after a run that failed, or on a device that has no part in it."""
    for layer in table_layers(model):
        put_back(model, layer, None)


def placements(recipe: Recipe, plan: Plan, devices: tuple[str, ...]) -> tuple[TablePlacement, ...]:
    """Rows by device: the plan's own word, or what the recipe says.

    "cpu": in equal parts by the hosts' side of each device. Weights by device, {"a": 5, "b": 3}: in that
    proportion. Example: 10 rows as {"a": 5, "b": 3, "c": 2} are 5, 3 and 2.
    """
    given = {p.table: p for p in plan.tables}
    found = []
    for layer in table_layers(recipe.model):
        table = layer.table
        if table.name in given:
            found.append(given[table.name])
            continue
        wish = recipe.places[table.name]
        residence = residence_of(recipe, table.name)
        if isinstance(wish, str) or residence == TIERED:
            weights = dict.fromkeys(devices, 1.0)
        else:
            weights = {d: float(w) for d, w in wish.items()}
        rows = apportion(table.num_rows, list(weights.values()))
        found.append(
            TablePlacement(table=table.name, rows=dict(zip(weights, rows, strict=True)), residence=residence)
        )
    return tuple(found)


@dataclass
class JobTables:
    """This device's tables; without any, all of it does nothing."""

    layers: list[TableLayer] = field(default_factory=list)
    here: list[TableLayer] = field(default_factory=list)
    exchange: Exchange = field(default_factory=lambda: Exchange(1))
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


def _room(table: Table, first: int, last: int) -> Tensor:
    return torch.empty(last - first, table.dim, dtype=table.dtype)


def _nothing(batch: Any) -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


def optimizer_of(
    recipe: Recipe, table: str, optimizer: torch.optim.Optimizer | None = None
) -> TableOptimizer:
    """What moves the rows of `table`: as the recipe says, else as `optimizer`, one of the recipe's, does.

    ModelError where no optimiser of tables does the same.
    """
    given = recipe.table_optimizer
    if isinstance(given, Mapping):
        given = given.get(table)
    if given is not None:
        return given
    return like_torch(optimizer or recipe.make_optimizer([nn.Parameter(torch.zeros(1))]), table)


def save_part(table: Table, folder: Path) -> Path | None:
    """Write this device's rows as `table-NAME-FIRST-END.safetensors`; None where it has none."""
    start, stop = table.part.start, table.part.stop
    if start == stop:
        return None
    path = folder / f"table-{table.name}-{start}-{stop}.safetensors"
    save_file(
        {f"{table.name}.weight": torch.cat([rows for _, rows in pieces(table, start, stop, mine=True)])}, path
    )
    return path


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
    exchange = Exchange(ranks.world_size, seat.new_group(ranks.devices) if several else None)
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


def ids_found(
    recipe: Recipe, layers: list[TableLayer], *, must: bool = True
) -> tuple[dict[str, IdsOf], tuple[str, ...]]:
    """How to read each table's ids from a batch, found by running the model unless the recipe says it.

    ModelError where no part of a batch holds them and they `must` be found: one device by itself can do
    without, and then looks up what the model asks for, and nothing ahead.
    """
    batch = recipe.batch_of(_WATCHED_SAMPLES)
    args, kwargs, _ = recipe.problem.inputs(batch)
    asked: dict[str, list[Tensor]] = {}
    # Found once: later on the model is no longer whole and on the CPU.
    known = {x.table.name: x.table.ids_of for x in layers if x.table.ids_of}
    if any(recipe.ids.get(x.table.name, known.get(x.table.name)) is None for x in layers):
        asked = ids_asked(recipe.model, layers, lambda: recipe.model(*args, **kwargs))
    found, notes = {}, []
    for name in dict.fromkeys(x.table.name for x in layers):
        given = recipe.ids.get(name, known.get(name))
        if given is not None:
            found[name] = given
        if given is not None or (name in recipe.ids and not must):
            continue
        try:
            found[name], note = find_ids(batch, asked[name], name)
        except ModelError as e:
            if must:
                raise
            note = f"table {name}: {e.what}, so none are sent before they are asked for"
        notes.append(note)
    for layer in layers:
        layer.table.ids_of = found.get(layer.table.name)
    return found, tuple(notes)
