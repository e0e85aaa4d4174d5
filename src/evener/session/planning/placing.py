"""Places for tables that the planner is to choose: what each asks for, the decision, and rows by the plan.

recipe.place, --place ──► stand-ins ──► one device decides ──► all do so ──► measuring ──► plan ──► rows
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from msgspec.structs import replace
from torch import nn

from evener.core.figures import Figure, Value
from evener.core.fleet import Fleet
from evener.core.plan import Plan, TablePlacement
from evener.core.tables import TableUse
from evener.errors import ModelError, NoPlanFitsError, UsageError
from evener.planner.tables import CPU, DENSE, DEVICE, no_device_holds, place_tables, table_sites
from evener.policy.table_rows import taken_over
from evener.probing.rates import rows_rate
from evener.runtime.tables.layer import TableLayer, place_table, put_back, table_layers
from evener.session.layout.tables import ids_found, optimizer_of, placements, table_names
from evener.session.meeting import Meeting
from evener.session.planning.place_words import AUTO, KEYS, check_place
from evener.session.recipe import ALL_TABLES, LOSS_PLACE, Recipe
from evener.session.request import Request

MODEL_COPIES = 4  # parameters, gradients and two moments: what a device keeps of the rest of a model
MOST_READ = 4096  # samples that are read to see how many ids of a step are different


class Settled(Value, frozen=True, kw_only=True):
    """The tables whose place was decided, as all devices are told; rows are those of the whole fleet."""

    tables: tuple[TablePlacement, ...] = ()
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placing:
    """What was decided; on the device that decided also what it takes to share rows out under a plan."""

    settled: Settled = dataclasses.field(default_factory=Settled)
    uses: tuple[TableUse, ...] = ()
    beside_bytes: int = 0
    rate: Figure | None = None

    def left(self, fleet: Fleet) -> Fleet:
        """The fleet as the planner may fill it: memory less what tables take of it."""
        devices = []
        for d in fleet.devices:
            memory, held = d.free_memory_bytes or d.memory_bytes, _held(self.settled.tables, fleet, d.name)
            if memory is not None and held:
                d = replace(d, free_memory_bytes=replace(memory, value=max(1.0, memory.value - held)))
            devices.append(d)
        return replace(fleet, devices=tuple(devices))

    def on(self, plan: Plan, fleet: Fleet, recipe: Recipe, note: str = "") -> Plan:
        """The plan with rows of all tables by its devices, by budget where the planner chose the place.

        `note` goes behind the reasons. NoPlanFitsError where its devices, perhaps fewer than were offered,
        have no room.
        """
        given = {p.table for p in plan.tables}
        where = {p.table: p.residence or CPU for p in self.settled.tables}
        uses = tuple(u for u in self.uses if u.name not in given)
        sites = table_sites(fleet, plan.devices, beside_bytes=self.beside_bytes, rate=self.rate)
        chosen = place_tables(uses, fleet, sites, plan.global_batch, only=where)
        placed = (replace(c.placement, why=c.why + note) for c in chosen)
        decided = {u.name for u in self.uses} | given
        stay = (t for t in self.settled.tables if t.table not in decided)
        every = replace(plan, tables=(*plan.tables, *placed, *stay))
        known = {p.table for p in every.tables}
        asked = [p for p in placements(recipe, every, plan.devices) if p.table not in known]
        return with_rows(plan, (*every.tables, *(_as_asked(recipe, p) for p in asked)), fleet)


def beside_tables(fleet: Fleet, tables: Sequence[TablePlacement]) -> Fleet:
    """The fleet as a planner may fill it once its devices have taken over the rows of `tables`."""
    stays = tuple(d.name for d in fleet.devices)
    return Placing(settled=Settled(tables=taken_over(tables, stays))).left(fleet)


def with_rows(plan: Plan, tables: Sequence[TablePlacement], fleet: Fleet) -> Plan:
    """`plan` with `tables` in the place of its own, counted in the memory that it predicts."""
    told = plan.prediction
    if told is not None and told.memory_bytes:
        memory = {
            d: b + _held(tables, fleet, d) - _held(plan.tables, fleet, d)
            for d, b in told.memory_bytes.items()
        }
        told = replace(told, memory_bytes=memory)
    return replace(plan, tables=tuple(tables), prediction=told)


def _held(tables: Sequence[TablePlacement], fleet: Fleet, device: str) -> int:
    """Bytes of rows in the memory of `device`; a dense table was measured with the model."""
    on_cpu = fleet.device(device).type == "cpu"
    lying = [t for t in tables if t.residence == DEVICE or (t.residence == CPU and on_cpu)]
    return sum(t.held_bytes.get(device, 0) for t in lying)


def plan_with_tables(
    choose: Callable[[Request, Fleet], Plan], request: Request, fleet: Fleet, recipe: Recipe, placing: Placing
) -> Plan:
    """What `choose` finds, with the rows of its tables; all devices take part where fewer have no room, or
    where one that the recipe gives rows would be left out.

    NoPlanFitsError where even all of them have no room; UsageError where a given split leaves such a one out.
    """
    left = placing.left(fleet)
    plan = choose(request, left)
    free = not (request.keep_all or request.batch_per_device or request.even)
    idle = {d: table for d, table in holders(recipe).items() if d not in plan.devices}
    said = ", ".join(f"{d} has rows of the table {table}" for d, table in idle.items())
    if idle and not free:
        raise UsageError(
            f"a device without samples holds no rows: {said}",
            numbers=f"the split: {', '.join(f'{d} {n}' for d, n in plan.samples_by_device().items())}",
            remedy="samples for it, or no rows",
        )
    if idle:
        plan = choose(replace(request, keep_all=True), left)
        plan = replace(plan, why=f"{plan.why}; all devices take part, as {said}")
    try:
        return placing.on(plan, fleet, recipe)
    except NoPlanFitsError:
        if not free or len(plan.devices) == len(fleet.devices):
            raise
        few = ", ".join(plan.devices)
        note = f"; all devices take part: {few} alone would be faster and has no room for the rows"
        return placing.on(choose(replace(request, keep_all=True), left), fleet, recipe, note)


def holders(recipe: Recipe) -> dict[str, str]:
    """The devices that the recipe itself gives rows, each with a table that it has rows of."""
    asked = {t: w for t, w in recipe.places.items() if isinstance(w, Mapping) and not set(w) & set(KEYS)}
    return {device: table for table, parts in asked.items() for device, part in parts.items() if part}


def _as_asked(recipe: Recipe, placed: TablePlacement) -> TablePlacement:
    """A placement of the recipe's own with its bytes."""
    (layer, *_) = _layers_named(recipe.model, [placed.table])
    table = layer.table
    numbers = table.dim + sum(optimizer_of(recipe, table.name).widths(table.dim).values())
    held = {d: n * numbers * table.dtype.itemsize for d, n in placed.rows.items()}
    in_memory = placed.residence in (None, CPU, DEVICE)
    return replace(placed, held_bytes=held if in_memory else {}, why="as asked")


def with_places(recipe: Recipe, request: Request) -> Recipe:
    """The recipe with a place for each table that is asked for one, "*" spelt out.

    What `request` says of a table, or of all, goes before the recipe's own word.

    Not asked for and placed all the same are tables that no device of the job could hold with their gradients
    and state, and those on the meta device: there is no other way to train them. Raises as check_place.
    """
    own = recipe.places if ALL_TABLES not in request.place else {}
    asked = {n: w for n, w in recipe.places.items() if n == LOSS_PLACE} | {**own, **request.place}
    for name, where in asked.items():
        if name != LOSS_PLACE:
            check_place(name, where, request.fleet)
    found = dict(asked)
    for name, layer in _tables_of(recipe.model).items():
        wanted = ALL_TABLES in asked or _is_beyond(recipe, request.fleet, name, layer)
        if name not in found and wanted and not why_not(recipe.model, name):
            found[name] = asked.get(ALL_TABLES, AUTO)
    return dataclasses.replace(recipe, place=found)


def why_not(model: nn.Module, name: str) -> str:
    """Why the table `name` cannot be placed; empty where it can."""
    try:
        put_back(model, place_table(model, name), None)
    except ModelError as e:
        return e.what
    return ""


def settled(
    recipe: Recipe, request: Request, meeting: Meeting, *, decides: bool | None = None
) -> tuple[Recipe, Placing]:
    """Decide where the tables go that were left to the planner, and do so; called by all devices together.

    The first process (or who `decides`) does before anything is measured, from sizes, ids, memory and
    bandwidth: what is measured then is what will run. Dense tables are the user's own layers again.
    """
    open_names = [n for n in table_names(recipe) if recipe.places[n] == AUTO]
    if not open_names and ALL_TABLES not in recipe.places:
        return recipe, Placing()
    placing = Placing()
    if meeting.rank == 0 if decides is None else decides:
        placing = _decided(recipe, request, open_names)
        meeting.put("tables", placing.settled)
    else:
        placing = Placing(settled=meeting.get("tables", Settled))
    where = {p.table: p.residence or CPU for p in placing.settled.tables}
    for layer in table_layers(recipe.model):
        if where.get(layer.table.name) == DENSE:
            put_back(recipe.model, layer, None)
    return dataclasses.replace(recipe, place={**recipe.places, **where}), placing


def _decided(recipe: Recipe, request: Request, names: list[str]) -> Placing:
    fleet = request.fleet
    left = _tables_of(recipe.model) if ALL_TABLES in recipe.places else {}
    reasons = {name: why_not(recipe.model, name) for name in left}
    notes = tuple(f"table {name} stays as it is: {why}" for name, why in reasons.items() if why)
    given = {t.table: t for t in request.plan.tables} if request.plan else {}
    fixed = tuple(given[n] for n in names if n in given)
    uses, stay = [], []
    for layer in _layers_named(recipe.model, [n for n in names if n not in given]):
        try:
            uses.append(use_of(recipe, layer))
        except ModelError as e:
            stay.append(TablePlacement(table=layer.table.name, rows={}, residence=DENSE, why=e.what))
    unknown = not request.rehearse and not any(_cpu_rate(fleet, d.host) for d in fleet.devices)
    rate = rows_rate() if uses and unknown else None
    beside = MODEL_COPIES * sum(p.nbytes for p in recipe.model.parameters())
    everyone = tuple(d.name for d in fleet.devices)
    sites = table_sites(fleet, everyone, beside_bytes=beside, rate=rate)
    chosen = place_tables(uses, fleet, sites, recipe.global_batch)
    tables = (*fixed, *stay, *(c.placement for c in chosen))
    return Placing(
        settled=Settled(tables=tables, notes=notes), uses=tuple(uses), beside_bytes=beside, rate=rate
    )


def use_of(recipe: Recipe, layer: TableLayer) -> TableUse:
    """What steps of the recipe ask of a table: ids of samples from all over its data, and how many differ.

    ModelError where the recipe's optimiser cannot move it.
    """
    table = layer.table
    state = sum(optimizer_of(recipe, table.name).widths(table.dim).values())
    size = len(recipe.dataset)
    samples = min(recipe.global_batch, MOST_READ, size)
    plain = TableUse(
        name=table.name,
        num_rows=table.num_rows,
        dim=table.dim,
        state_numbers=state,
        number_bytes=table.dtype.itemsize,
    )
    try:
        ids_of, _ = ids_found(recipe, [layer])
    except ModelError:
        return plain  # its ids stand in no batch: one a sample, all different
    batch = recipe.collate_fn([recipe.dataset[i * size // samples] for i in range(samples)])
    ids = ids_of[table.name](batch).reshape(-1)
    if not len(ids):
        return plain
    return replace(
        plain,
        ids_per_sample=len(ids) / samples,
        distinct=len(torch.unique(ids)) / len(ids),
        source="measured",
    )


def _is_beyond(recipe: Recipe, fleet: Fleet, name: str, layer: nn.Embedding | nn.EmbeddingBag) -> bool:
    if layer.weight.is_meta:
        return True
    try:
        state = sum(optimizer_of(recipe, name).widths(layer.embedding_dim).values())
    except ModelError:
        return False
    use = TableUse(
        name=name,
        num_rows=layer.num_embeddings,
        dim=layer.embedding_dim,
        state_numbers=state,
        number_bytes=layer.weight.dtype.itemsize,
    )
    return no_device_holds(use, fleet)


def _tables_of(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}


def _layers_named(model: nn.Module, names: list[str]) -> list[TableLayer]:
    return [layer for layer in table_layers(model) if layer.table.name in names]


def _cpu_rate(fleet: Fleet, host: str) -> Figure | None:
    cpu = fleet.host_cpu(host)
    return cpu.bytes_per_s if cpu else None
