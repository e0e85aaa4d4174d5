"""A tiered table is the table, whatever is in which memory; its file is as of one step, whatever happens."""

import errno
import multiprocessing
import os
import shutil
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from evener.errors import EnvironmentBrokenError, FileError, UsageError
from evener.runtime.tables.coldfile import ColdFile
from evener.runtime.tables.optimizers import TableAdam
from evener.runtime.tables.rows import WEIGHT, MemoryRows, Rows
from evener.runtime.tables.table import Part, Table
from evener.runtime.tables.tiered import TieredRows

ROWS, DIM = 40, 3


def weight() -> torch.Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))


def tiered(folder: Path, host: int, hot: int = 0) -> TieredRows:
    return TieredRows(folder, ROWS, lambda a, b: weight()[a:b], host=host, hot=hot)


def trained(rows: Rows, steps: int = 30, first: int = 0) -> torch.Tensor:
    """The table after so many steps of dense Adam, from number `first` on; some rows come often."""
    table = Table("emb", ROWS, DIM, Part(0, ROWS, rows))
    table.use(TableAdam())
    generator = torch.Generator().manual_seed(1)
    for step in range(first + steps):
        ids = torch.unique(torch.randint(0, ROWS, (14,), generator=generator) // 2)
        if step < first:
            continue
        table.begin(1.0)
        table.collect(ids, table.read(ids).square())
        table.sum_up()
        table.move(0.01 / (1 + step))
        table.discard()
    return table.own(torch.arange(ROWS))


@pytest.mark.parametrize(("host", "hot"), [(40, 0), (10, 0), (3, 0), (12, 5), (5, 12)])
def test_any_tiers_train_as_one_memory(tmp_path: Path, host: int, hot: int) -> None:
    want = trained(MemoryRows(weight()))
    rows = tiered(tmp_path, host, hot)
    torch.testing.assert_close(trained(rows), want, rtol=0, atol=1e-6)
    assert set(rows.found_in) == {"host", "file"} | ({"hot"} if hot else set())


@pytest.mark.parametrize("hot", [0, 4])
def test_only_rows_that_are_looked_up_are_counted(tmp_path: Path, hot: int) -> None:
    """Moving a row that was just read always found it: hit rates of half and more were those of the moves."""
    rows = tiered(tmp_path, 8, hot)
    rows.prepare({})
    rows.slots(torch.tensor([1, 2, 3]), looked_up=True)
    rows.changed(rows.slots(torch.tensor([1, 2, 3])))
    rows.slots(torch.tensor([3, 4, 5]), looked_up=True)
    rows.commit()
    upper = "hot" if hot else "host"
    assert {n: x for n, x in rows.found_in.items() if x} == {upper: 1, "file": 5}
    rows.slots(torch.tensor([20, 21, 22]))
    rows.slots(torch.tensor([3, 4, 5]), looked_up=True)
    assert sum(rows.found_in.values()) == 9
    assert rows.found_in["host"] + rows.found_in.get("hot", 0) == 4


def test_popular_rows_stay(tmp_path: Path) -> None:
    rows = tiered(tmp_path, 10)
    for step in range(200):
        rows.slots(torch.tensor([1, 2, 3, 4 + step % 36]))
    rows.slots(torch.tensor([1, 2, 3]), looked_up=True)
    assert rows.found_in == {"host": 3, "file": 0}


def test_what_was_committed_is_found_again(tmp_path: Path) -> None:
    rows = tiered(tmp_path, 10)
    want = trained(rows)
    rows.commit()
    rows.close()
    again = tiered(tmp_path, 7)
    again.prepare(TableAdam().widths(DIM))
    assert again.file.step == 30
    read = torch.cat([again.columns[WEIGHT][again.slots(i)] for i in torch.arange(ROWS).split(5)])
    torch.testing.assert_close(read, want, rtol=0, atol=0)


def test_a_folder_is_gone_on_with_as_if_nobody_had_stopped(tmp_path: Path) -> None:
    """A run that opened the folder of an earlier one counted its steps from 0.

    Every row then seemed to be ahead of the run, so that nothing it missed was made up for, and Adam took
    moments of thirty steps for those of the first: rows moved ten times too far, and nobody was told.
    """
    want = trained(MemoryRows(weight()), 60)
    rows = tiered(tmp_path, 10)
    trained(rows, 30)
    rows.commit()
    rows.close()
    torch.testing.assert_close(trained(tiered(tmp_path, 7), 30, first=30), want, rtol=0, atol=1e-6)


def test_rates_of_steps_that_were_never_committed_are_not_counted(tmp_path: Path) -> None:
    rows = tiered(tmp_path, 10)
    trained(rows, 20)
    rows.commit()
    rows.close()
    rates = next(tmp_path.glob("*/rates"))
    rates.write_bytes(rates.read_bytes() + bytes(80))  # as a commit that was killed before the rows leaves it
    again = tiered(tmp_path, 10)
    again.prepare(TableAdam().widths(DIM))
    assert (again.file.step, len(again.rates)) == (20, 20)
    again.close()
    rates.unlink()
    with pytest.raises(FileError, match="does not have the learning rates"):
        tiered(tmp_path, 10).prepare(TableAdam().widths(DIM))


def made(folder: Path) -> ColdFile:
    """A file of 6 rows that are all 1 as of step 1, with rows 2 and 4 written as 2 since."""
    file = ColdFile(folder, 6, 2, torch.float32)
    file.write(np.arange(6), np.ones((6, 2), np.float32))
    file.commit(1)
    file.write(np.array([2, 4]), np.full((2, 2), 2, np.float32))
    return file


OLD, NEW = [1.0] * 6, [1.0, 1.0, 2.0, 1.0, 2.0, 1.0]


def held(folder: Path) -> tuple[int, list[float]]:
    file = ColdFile(folder, 6, 2, torch.float32)
    rows = file.read(np.arange(6))
    file.close()
    assert (rows[:, 0] == rows[:, 1]).all(), "a row is torn"
    return file.step, rows[:, 0].tolist()


def test_newer_rows_are_read_before_they_are_committed(tmp_path: Path) -> None:
    file = made(tmp_path)
    assert file.read(np.arange(6))[:, 0].tolist() == NEW
    file.close()
    assert held(tmp_path) == (1, OLD)


def test_every_place_where_a_log_can_break_off(tmp_path: Path) -> None:
    file = made(tmp_path / "now")
    apply = file._apply
    file._apply = lambda count, step: None  # type: ignore[method-assign]
    file.commit(2)  # the log is whole, `rows` as of step 1
    file.close()
    log = (tmp_path / "now" / "log").read_bytes()
    for size in range(len(log) + 1):
        folder = tmp_path / f"cut{size}"
        shutil.copytree(tmp_path / "now", folder)
        (folder / "log").write_bytes(log[:size])
        assert held(folder) == ((2, NEW) if size == len(log) else (1, OLD))
        assert held(folder) == ((2, NEW) if size == len(log) else (1, OLD)), "opened twice"
        shutil.rmtree(folder)
    assert apply is not None


def test_a_log_with_a_wrong_byte_counts_for_nothing(tmp_path: Path) -> None:
    file = made(tmp_path)
    file._apply = lambda count, step: None  # type: ignore[method-assign]
    file.commit(2)
    file.close()
    log = bytearray((tmp_path / "log").read_bytes())
    log[9] ^= 1
    (tmp_path / "log").write_bytes(log)
    assert held(tmp_path) == (1, OLD)


def test_rows_half_copied_are_copied_again(tmp_path: Path) -> None:
    file = made(tmp_path)
    file._apply = lambda count, step: None  # type: ignore[method-assign]
    file.commit(2)
    file.close()
    rows = np.memmap(tmp_path / "rows", np.float32, "r+", shape=(6, 2))
    rows[2, 0] = 2.0  # and not yet its second number
    rows.flush()
    assert held(tmp_path) == (2, NEW)


def write_for_ever(folder: Path, told: Connection) -> None:
    file = ColdFile(folder, 2000, 16, torch.float32)
    step = file.step
    while True:
        step += 1
        file.write(np.arange(2000), np.full((2000, 16), step, np.float32))
        file.commit(step)
        told.send(step)


def test_a_process_killed_while_it_writes(tmp_path: Path) -> None:
    last, context = -1, multiprocessing.get_context("fork")
    for wait in range(3):
        heard, told = context.Pipe(duplex=False)
        process = context.Process(target=write_for_ever, args=(tmp_path, told))
        process.start()
        told.close()
        for _ in range(3 + 2 * wait):
            last = heard.recv()
        process.kill()
        process.join()
        file = ColdFile(tmp_path, 2000, 16, torch.float32)
        rows = file.read(np.arange(2000))
        assert file.step >= last
        assert (rows == rows[0, 0]).all() and rows[0, 0] == file.step
        file.close()


def test_a_full_disk_is_said_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(EnvironmentBrokenError, match="cannot be written: No space left on device"):
            ColdFile(tmp_path / "new", 6, 2, torch.float32)
        with pytest.raises(EnvironmentBrokenError, match="48 bytes more; nothing was committed before"):
            ColdFile(tmp_path / "new", 6, 2, torch.float32)
    file = made(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(EnvironmentBrokenError, match="what was committed last, step 1, is there in full"):
            file.commit(2)
    file.close()
    step, rows = held(tmp_path)
    assert (step, rows) in ((1, OLD), (2, NEW))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(FileError, match=r"taken/emb cannot be made: Not a directory"):
        ColdFile(tmp_path / "taken" / "emb", 6, 2, torch.float32)


def test_folders_that_hold_something_else(tmp_path: Path) -> None:
    file = made(tmp_path)
    with pytest.raises(FileError, match="open in another process"):
        ColdFile(tmp_path, 6, 2, torch.float32)
    file.close()
    with pytest.raises(FileError, match="holds another table"):
        ColdFile(tmp_path, 7, 2, torch.float32)
    (tmp_path / "table.json").write_text("{")
    with pytest.raises(FileError, match="cannot be read"):
        ColdFile(tmp_path, 6, 2, torch.float32)


def test_no_rows_in_memory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="0 rows in memory"):
        tiered(tmp_path, 0)
