"""What a checkpoint has of a table is what torch's optimiser of a dense one has; it goes on from there."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from evener.errors import StateError
from evener.runtime.checkpoints.files import Disk
from evener.runtime.checkpoints.folder import FOLDER, Checkpoint, partial_of
from evener.runtime.checkpoints.saving import Part as Shard
from evener.runtime.checkpoints.saving import complete, write_part
from evener.runtime.tables import sharing
from evener.runtime.tables.coldfile import ColdFile
from evener.runtime.tables.optimizers import TableAdagrad, TableAdam, TableOptimizer, TableSGD
from evener.runtime.tables.rows import MemoryRows
from evener.runtime.tables.saving import export_table, import_table
from evener.runtime.tables.table import Part, Table
from evener.runtime.tables.tiered import TieredRows
from tests.checkpoints import manifest_at

ROWS, DIM, SPLIT = 40, 3, 15


def weight() -> torch.Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def ids_at(step: int) -> torch.Tensor:
    return torch.unique(torch.randint(0, ROWS, (6,), generator=torch.Generator().manual_seed(step)))


def train(table: Table, steps: range) -> None:
    """Steps on rows of this table's part, each with the square of its rows as gradient."""
    for step in steps:
        ids = ids_at(step)
        ids = ids[(ids >= table.part.start) & (ids < table.part.stop)] - table.part.start
        table.begin(1.0)
        table.collect(ids, table.own(ids).square())
        table.sum_up()
        table.gradient = (ids, table.gradient[1])  # type: ignore[index]
        table._untouched = False  # somebody's rows are touched in every step
        table.move(0.1 / (1 + step))
        table.discard()


def table_of(start: int, stop: int, optimizer: TableOptimizer, rows: torch.Tensor | None = None) -> Table:
    held = weight()[start:stop] if rows is None else rows
    table = Table("emb", ROWS, DIM, Part(start, stop, MemoryRows(held.clone())))
    table.use(optimizer)
    return table


def saved(folder: Path, tables: list[Table]) -> Checkpoint:
    """As the devices of a job would, one after the other."""
    files, partial, written = Disk(), folder / FOLDER / partial_of(8, "token"), []
    for i, table in enumerate(tables):
        exported = export_table(table, leads=not i)
        shard = Shard(
            partial=partial,
            device=f"lab/{i}",
            place=i + 1,
            places=len(tables),
            copy=lambda e=exported: {n: t.contiguous() for n, t in e.tensors.items()} | e.later,
            statistics={},
        )
        written.append(write_part(files, shard))
        exported.release()
    assert not any(w.error for w in written), written
    done = complete(files, partial, manifest_at(8), written, keep_last=3)
    assert done.path is not None, done.why
    return Checkpoint(done.path)


def dense(make: Callable[[Any], torch.optim.Optimizer], steps: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """A plain parameter after the same steps, and what torch's optimiser keeps for it."""
    p = nn.Parameter(weight())
    optimizer = make([p])
    for step in range(steps):
        p.grad = torch.zeros_like(p)
        ids = ids_at(step)
        p.grad[ids] = p.detach()[ids].square()
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.step()
    return p.detach(), optimizer.state[p]


def in_a_file(folder: Path, start: int, stop: int, optimizer: TableOptimizer) -> Table:
    """Seven rows in memory, the others in a file; a step asks for six at most."""
    rows = TieredRows(
        folder / f"{start}-{stop}", stop - start, lambda a, b: weight()[start:stop][a:b], host=7
    )
    table = Table("emb", ROWS, DIM, Part(start, stop, rows))
    table.use(optimizer)
    return table


def in_memory(folder: Path, start: int, stop: int, optimizer: TableOptimizer) -> Table:
    return table_of(start, stop, optimizer)


WHERE = pytest.mark.parametrize("make", [in_memory, in_a_file], ids=["memory", "file"])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written and read in several pieces, as those of a large table."""
    monkeypatch.setattr(sharing, "CHUNK_BYTES", 600)


CASES = pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (TableSGD(weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1)),
        (TableAdam(), lambda p: torch.optim.Adam(p)),
        (
            TableAdam(weight_decay=0.1, decoupled=True),
            lambda p: torch.optim.AdamW(p, weight_decay=0.1),
        ),
        (
            TableAdagrad(initial=0.2, eps=1e-10),
            lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.2),
        ),
    ],
    ids=["sgd", "adam", "adamw", "adagrad"],
)


@CASES
@WHERE
def test_state_has_the_names_and_numbers_of_torch(
    tmp_path: Path, make: Any, ours: TableOptimizer, theirs: Callable[[Any], torch.optim.Optimizer]
) -> None:
    tables = [make(tmp_path, 0, SPLIT, ours), make(tmp_path, SPLIT, ROWS, ours)]
    for table in tables:
        train(table, range(20))
    checkpoint = saved(tmp_path, tables)
    want, state = dense(theirs, 20)
    names = {"model/emb.weight": want} | {
        f"optimizer/emb.weight/{k}": v for k, v in state.items() if v is not None
    }
    assert set(checkpoint.manifest.wholes) == set(names)
    found = checkpoint.read(list(names))
    for name, tensor in names.items():
        torch.testing.assert_close(found[name].double(), tensor.double(), rtol=0, atol=1e-9)


@CASES
@WHERE
@pytest.mark.parametrize("bounds", [(0, ROWS), (0, 4), (10, 33), (20, 20)], ids=str)
def test_it_goes_on_in_other_parts(
    tmp_path: Path, ours: TableOptimizer, theirs: object, bounds: tuple[int, int], make: Any
) -> None:
    tables = [make(tmp_path, 0, SPLIT, ours), make(tmp_path, SPLIT, ROWS, ours)]
    for table in tables:
        train(table, range(20))
    checkpoint = saved(tmp_path, tables)
    straight, again = (
        table_of(*bounds, ours),
        table_of(*bounds, ours, torch.zeros(bounds[1] - bounds[0], DIM).double()),
    )
    train(straight, range(30))
    import_table(again, checkpoint)
    train(again, range(20, 30))
    every = torch.arange(bounds[1] - bounds[0])
    torch.testing.assert_close(again.own(every), straight.own(every), rtol=0, atol=1e-10)


@WHERE
def test_saving_leaves_the_table_as_it_would_have_been(tmp_path: Path, make: Any) -> None:
    ours, undisturbed = make(tmp_path, 0, ROWS, TableAdam()), table_of(0, ROWS, TableAdam())
    train(ours, range(20))
    saved(tmp_path, [ours])
    train(ours, range(20, 40))
    train(undisturbed, range(40))
    every = torch.arange(ROWS)
    torch.testing.assert_close(ours.own(every), undisturbed.own(every), rtol=0, atol=1e-10)


@CASES
def test_a_table_in_a_file_goes_on_where_a_checkpoint_was(
    tmp_path: Path, ours: TableOptimizer, theirs: object
) -> None:
    """The folder holds something newer: of that nothing is left, in memory or below."""
    straight, tables = (
        table_of(0, ROWS, ours),
        [table_of(0, SPLIT, ours), table_of(SPLIT, ROWS, ours)],
    )
    for table in (straight, *tables):
        train(table, range(20))
    checkpoint = saved(tmp_path, tables)
    again = in_a_file(tmp_path, 0, ROWS, ours)
    train(again, range(50, 80))
    import_table(again, checkpoint)
    for table in (straight, again):
        train(table, range(20, 30))
    every = torch.arange(ROWS)
    torch.testing.assert_close(again.own(every), straight.own(every), rtol=0, atol=1e-10)
    again.part.rows.commit()
    again.part.rows.close()  # type: ignore[attr-defined]
    reopened = in_a_file(tmp_path, 0, ROWS, ours)
    torch.testing.assert_close(reopened.own(every), straight.own(every), rtol=0, atol=1e-10)


def frozen(table: Table) -> tuple[dict[str, torch.Tensor], TieredRows]:
    rows = table.part.rows
    assert isinstance(rows, TieredRows)
    return {c: t.clone() for c, t in rows.committed(0, ROWS).items()}, rows


def test_the_training_goes_on_while_a_checkpoint_reads_the_file(tmp_path: Path) -> None:
    """It reads what the rows were; the log grows up to the table's size meanwhile, then a commit waits."""
    ours, undisturbed = in_a_file(tmp_path, 0, ROWS, TableAdam()), table_of(0, ROWS, TableAdam())
    train(ours, range(20))
    train(undisturbed, range(20))
    was = undisturbed.own(torch.arange(ROWS)).clone()
    exported, rows = export_table(ours, leads=True), frozen(ours)[1]
    step = 20
    while rows.file.logged < ROWS - 6:
        train(ours, range(step, step + 1))
        step += 1
    assert rows.file.logged > 4 * 7 and rows.file.step == 20
    later = threading.Timer(0.2, exported.release)
    found = {n: x.read().clone() for n, x in exported.later.items() if n.startswith("rows/model")}
    assert len(found) > 3
    torch.testing.assert_close(torch.cat(list(found.values())), was, rtol=0, atol=1e-10)
    later.start()
    train(ours, range(step, step + 6))
    later.join()
    assert rows.file.step > step
    with pytest.raises(StateError, match="no longer what the checkpoint was to have"):
        next(iter(exported.later.values())).read()
    train(undisturbed, range(20, step + 6))
    every = torch.arange(ROWS)
    torch.testing.assert_close(ours.own(every), undisturbed.own(every), rtol=0, atol=1e-10)


def test_a_process_killed_while_it_takes_up_a_checkpoint_leaves_no_torn_table(tmp_path: Path) -> None:
    whole = table_of(0, ROWS, TableAdam())
    train(whole, range(20))
    checkpoint = saved(tmp_path, [whole])
    table = in_a_file(tmp_path, 0, ROWS, TableAdam())
    train(table, range(30))
    table.part.rows.commit()
    pieces = []

    def dies(file: ColdFile, first: int, rows: Any) -> None:
        pieces.append(first)
        fill(file, first, rows)
        if len(pieces) == 2:
            raise KeyboardInterrupt

    fill = ColdFile.fill
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ColdFile, "fill", dies)
        import_table(table, checkpoint)
    table.part.rows.close()  # type: ignore[attr-defined]
    again = in_a_file(tmp_path, 0, ROWS, TableAdam())
    assert torch.equal(again.own(torch.arange(ROWS)), weight()) and not len(again.rates.values)
    import_table(again, checkpoint)
    torch.testing.assert_close(
        again.own(torch.arange(ROWS)), whole.own(torch.arange(ROWS)), rtol=0, atol=1e-10
    )


def test_state_of_another_optimiser(tmp_path: Path) -> None:
    sgd = table_of(0, ROWS, TableSGD())
    train(sgd, range(3))
    checkpoint = saved(tmp_path / "sgd", [sgd])
    adam = table_of(0, ROWS, TableAdam())
    import_table(adam, checkpoint)  # none at all: it begins as a new one
    assert torch.equal(adam.own(torch.arange(ROWS)), sgd.own(torch.arange(ROWS)))
    assert not len(adam.rates.values)
    half = checkpoint.manifest.tensors | {"optimizer/emb.weight/exp_avg": None}
    partly = Checkpoint(checkpoint.path)
    object.__setattr__(partly, "manifest", type("M", (), {"wholes": half, "tensors": half})())
    with pytest.raises(StateError, match="has not all of the state of the table emb"):
        import_table(adam, partly)


def test_moments_without_the_number_of_their_steps_are_refused(tmp_path: Path) -> None:
    """They were taken as those of a first step, whose bias correction multiplies them."""
    adam = table_of(0, ROWS, TableAdam())
    train(adam, range(3))
    checkpoint = saved(tmp_path, [adam])
    (shard,) = checkpoint.manifest.shards
    there = {n: t for n, t in shard.tensors.items() if not n.endswith("/step")}
    manifest = replace(checkpoint.manifest, shards=(replace(shard, tensors=there),))
    partly = Checkpoint(checkpoint.path)
    object.__setattr__(partly, "manifest", manifest)
    with pytest.raises(StateError, match="after how many steps the table emb is"):
        import_table(table_of(0, ROWS, TableAdam()), partly)
