"""The tables of a recipe: which layers of its model are placed, where their rows are, what ids are read."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from evener.core.plan import Plan, TablePlacement
from evener.core.split import apportion
from evener.errors import ModelError
from evener.planner.tables import CPU, DENSE
from evener.runtime.tables.finding import IdsOf, find_ids, ids_asked
from evener.runtime.tables.layer import TableLayer, place_table, put_back, table_layers
from evener.runtime.tables.optimizers import TableOptimizer, like_torch
from evener.runtime.tables.table import Table
from evener.session.recipe import ALL_TABLES, LOSS_PLACE, Recipe

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
