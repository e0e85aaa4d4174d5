"""Which tables get a place, asked or not; what a table is asked for; rows by the plan that was found."""

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from evener.core.figures import Figure
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Prediction, Share, Stage, TablePlacement
from evener.errors import FileError, NoPlanFitsError, UnknownNameError, UsageError
from evener.runtime.tables.layer import TableLayer, table_layers
from evener.session.layout.tables import table_names
from evener.session.planning.agreed import prepared
from evener.session.planning.placing import (
    Placing,
    beside_tables,
    plan_with_tables,
    settled,
    with_places,
    with_rows,
)
from evener.session.recipe import Recipe
from evener.session.request import Request

MIB = 2**20


class Model(nn.Module):
    """a table of 1 MiB, one of 5 rows, one that shares its weight, one that is not made."""

    def __init__(self, meta: bool) -> None:
        super().__init__()
        self.large, self.small = nn.Embedding(16_384, 16), nn.Embedding(5, 16)
        self.word, self.out = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.out.weight = self.word.weight
        self.meta = nn.Embedding(30, 16, device="meta") if meta else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.large(x[:, 0]) + self.small(x[:, 1]) + self.word(x[:, 1])
        return self.out(rows if self.meta is None else rows + self.meta(x[:, 1]))


class Store:
    """A meeting of one process."""

    rank = 0

    def __init__(self) -> None:
        self.held: dict[str, object] = {}

    def put(self, key: str, value: object) -> None:
        self.held[key] = value


def recipe(place: object = None, meta: bool = False, **more: object) -> Recipe:
    x = torch.stack([torch.arange(64) * 100, torch.arange(64) % 5], 1)
    return Recipe(
        model=Model(meta),
        dataset=list(zip(x, torch.zeros(64, dtype=torch.int64), strict=True)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.Adam(p),
        global_batch=32,
        place=place or {},
        **more,  # type: ignore[arg-type]
    )


def request(folder: Path, *mib: float, **more: object) -> Request:
    devices = tuple(
        Device(
            name=f"lab/{i}",
            kind="k",
            memory_bytes=Figure(value=m * MIB, source="assumed"),
            bytes_per_s=Figure(value=1e10, source="assumed"),
        )
        for i, m in enumerate(mib)
    )
    return Request(fleet=Fleet(devices=devices), run_dir=str(folder), rehearse=True, **more)  # type: ignore[arg-type]


def test_tables_stay_unless_they_are_asked_for(tmp_path: Path) -> None:
    assert table_names(with_places(recipe(), request(tmp_path, 100))) == ()
    assert table_names(with_places(recipe("auto"), request(tmp_path, 100))) == ("large", "small")
    asked = request(tmp_path, 100, place={"small": "dense", "*": "cpu"})
    found = with_places(recipe({"large": "auto", "(loss)": "cpu"}), asked)
    assert table_names(found) == ("large",)
    assert (found.places["large"], found.places["(loss)"]) == ("cpu", "cpu")
    assert (
        with_places(recipe("cpu"), request(tmp_path, 100, place={"large": "auto"})).places["large"] == "auto"
    )


def test_what_no_device_could_hold_is_placed_unasked(tmp_path: Path) -> None:
    """1 MiB of weights, as much of gradients and twice that of moments, in 3 MiB."""
    assert with_places(recipe(), request(tmp_path, 3, 2)).places == {"large": "auto"}
    assert with_places(recipe(), request(tmp_path, 3, 5)).places == {}
    assert with_places(recipe(meta=True), request(tmp_path, 100)).places == {"meta": "auto"}


def test_the_decision_is_made_from_ids_that_were_counted(tmp_path: Path) -> None:
    wanted = request(tmp_path, 100)
    made, placing = settled(prepared(recipe("auto"), wanted), wanted, Store())  # type: ignore[arg-type]
    large, small = placing.settled.tables
    assert (large.residence, small.residence) == ("cpu", "dense")
    assert large.why.startswith("table large: 32 of 16384 rows a step (measured)")
    assert small.why.startswith("table small: 5 of 5 rows a step (measured)")
    assert large.rows == {"lab/0": 16_384}
    (note,) = placing.settled.notes
    assert note == "table word stays as it is: the table word shares its weight with out.weight"
    assert [x.table.name for x in table_layers(made.model)] == ["large"]
    assert not isinstance(made.model.small, TableLayer)
    assert table_names(made) == ("large",)


def test_an_optimiser_that_tables_do_not_have_leaves_them_where_they_are(tmp_path: Path) -> None:
    wanted = request(tmp_path, 100)
    made = recipe({"large": "auto"})
    object.__setattr__(made, "optimizer", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    made, placing = settled(prepared(made, wanted), wanted, Store())  # type: ignore[arg-type]
    (large,) = placing.settled.tables
    assert large.residence == "dense"
    assert "cannot be moved as SGD with momentum would" in large.why
    assert placing.on(plan("lab/0"), wanted.fleet, made).tables == (large,)


def plan(*devices: str) -> Plan:
    stages = [Stage(layers=("all",), shares=(Share(devices=(d,), samples=4),)) for d in devices]
    return Plan(
        global_batch=4 * len(devices),
        pipelines=tuple(Pipeline(samples=4, micro_batch=4, stages=(s,)) for s in stages),
        prediction=Prediction(step_s=1, lower_s=1, upper_s=1, memory_bytes=dict.fromkeys(devices, 1000)),
    )


def test_rows_go_to_the_devices_of_the_plan(tmp_path: Path) -> None:
    wanted = request(tmp_path, 100, 50, 50)
    made, placing = settled(prepared(recipe({"large": "auto"}), wanted), wanted, Store())  # type: ignore[arg-type]
    found = placing.on(plan("lab/0", "lab/2"), wanted.fleet, made)
    (large,) = found.tables
    assert list(large.rows) == ["lab/0", "lab/2"] and sum(large.rows.values()) == 16_384
    each = 16 * 4 * 3 + 4  # weight, two moments, the last step
    assert large.held_bytes == {d: n * each for d, n in large.rows.items()}
    assert found.prediction.memory_bytes == {d: 1000 + b for d, b in large.held_bytes.items()}
    left = placing.left(wanted.fleet)
    assert left.device("lab/0").free_memory_bytes.value < 100 * MIB


def test_a_plan_with_fewer_devices_may_have_no_room(tmp_path: Path) -> None:
    wanted = request(tmp_path, 3.5, 3.5)
    made, placing = settled(prepared(recipe({"large": "cpu", "small": "auto"}), wanted), wanted, Store())  # type: ignore[arg-type]
    assert placing.on(plan("lab/0", "lab/1"), wanted.fleet, made).tables[-1].why == "as asked"
    made, placing = settled(prepared(recipe(), wanted), wanted, Store())  # type: ignore[arg-type]
    placing.on(plan("lab/0", "lab/1"), wanted.fleet, made)
    with pytest.raises(NoPlanFitsError, match="the table large is larger than all memory"):
        placing.on(plan("lab/0"), wanted.fleet, made)


def test_a_place_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="place of large is 'gpu'"):
        with_places(recipe({"large": "gpu"}), request(tmp_path, 100))


def test_a_place_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    """Foreign devices, keys that lack, folders that cannot be made, tables that are not there."""
    wanted = request(tmp_path, 100)
    (tmp_path / "taken").write_text("")
    for place, error, said in (
        ({"large": {"lab9/x": 1}}, UnknownNameError, "weights of lab9/x, no device of the job"),
        ({"large": {"file": str(tmp_path)}}, UsageError, 'large is a tiered table without "rows"'),
        ({"large": {"file": str(tmp_path / "taken/large"), "rows": 5}}, FileError, "cannot be made"),
        ({"nosuch": "cpu"}, UnknownNameError, "the model has no layer 'nosuch' to place"),
    ):
        with pytest.raises(error, match=said):
            prepared(recipe(place), wanted)


def test_a_device_that_has_rows_is_kept(tmp_path: Path) -> None:
    """The fastest plan left lab/0 out, and then its rows were those of "no device of the job"."""
    wanted = request(tmp_path, 100, 100)
    made = prepared(recipe({"large": {"lab/0": 1, "lab/1": 3}}), wanted)

    def choose(asked: Request, left: Fleet) -> Plan:
        return plan("lab/0", "lab/1") if asked.keep_all else plan("lab/1")

    found = plan_with_tables(choose, wanted, wanted.fleet, made, Placing())
    assert found.devices == ("lab/0", "lab/1")
    assert found.why.endswith("; all devices take part, as lab/0 has rows of the table large")
    assert found.tables[0].rows == {"lab/0": 4096, "lab/1": 12_288}
    given = replace(wanted, batch_per_device={"lab/0": 0, "lab/1": 32})
    with pytest.raises(UsageError, match="a device without samples holds no rows: lab/0 has rows"):
        plan_with_tables(choose, given, given.fleet, made, Placing())


def test_rows_that_go_to_others_are_counted_once_where_they_come_to_lie() -> None:
    """A plan for fewer devices was made as if tables took nothing; one that stays counts them once."""
    fleet = Fleet(
        devices=tuple(
            Device(name=n, kind="k", type="cpu", memory_bytes=Figure(value=100.0 * MIB, source="assumed"))
            for n in ("lab/a", "lab/b")
        )
    )
    rows = {"lab/a": 4, "lab/b": 2, "lab/c": 2}
    held = {d: n * 10 * MIB for d, n in rows.items()}
    before = (TablePlacement(table="emb", rows=rows, residence="cpu", held_bytes=held),)
    left = beside_tables(fleet, before)
    assert [d.free_memory_bytes.value / MIB for d in left.devices if d.free_memory_bytes] == [50, 70]
    stages = (Stage(layers=("all",), shares=(Share(devices=("lab/a",), samples=8),)),)
    told = Prediction(step_s=1.0, lower_s=1.0, upper_s=1.0, memory_bytes={"lab/a": MIB})
    plan = Plan(
        global_batch=8, pipelines=(Pipeline(samples=8, micro_batch=8, stages=stages),), prediction=told
    )
    counted = with_rows(plan, before, fleet)
    assert counted.prediction is not None and counted.prediction.memory_bytes == {"lab/a": 41 * MIB}
    assert with_rows(counted, before, fleet) == counted
