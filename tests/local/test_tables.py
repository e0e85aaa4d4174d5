"""Tables shared out in any way train as one device with the whole table does, dense or sparse."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from evener.errors import ModelError, PeerLostError
from evener.runtime.tables.exchange import RowExchange
from evener.runtime.tables.layer import place_table
from evener.runtime.tables.rows import initial_rows
from evener.runtime.tables.sharing import fetch, gathered, in_memory, take_part
from evener.runtime.tables.table import Table
from tests.local.pool import Pool
from tests.local.tables import drawn, reference, train, train_cases

CASES = list(range(42))


@pytest.mark.parametrize("devices", [2, 3])
def test_any_sharing_trains_as_one_device(pool: Pool, devices: int) -> None:
    ends = pool.run(train_cases, devices, CASES)
    for number in CASES:
        want = reference(drawn(number, devices))
        for rank in range(devices):
            got = ends[rank][number]
            for name, tensor in got.items():
                error = float((tensor - want[name]).norm() / want[name].norm())
                assert error <= 1e-10, f"case {number} on {devices} devices, {name} of device {rank}"
        assert set(ends[0][number]) == set(want)


@pytest.mark.parametrize("number", CASES[:14])
def test_one_device_with_its_tables_in_host_memory(number: int) -> None:
    case = drawn(number, 1)
    got, want = train(0, 1, case), reference(case)
    assert set(got) == set(want)
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name], rtol=0, atol=1e-10)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(20, 3, sparse=True, padding_idx=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.emb(x)


def look_up(rank: int, world_size: int, ids: list[list[int]]) -> Any:
    """Each device's squared outputs summed; the summed gradient, norm and bytes sent."""
    model, exchange = Sparse(), RowExchange(world_size)
    table = place_table(model, "emb").table
    take_part(table, (0, 7, 20), rank, exchange, in_memory, seed=0)
    mine = torch.tensor(ids[rank], dtype=torch.int64)
    fetch([table], {"emb": lambda batch: batch}, [mine], exchange)
    table.begin(1.0)
    if len(mine):
        model(mine).square().sum().backward()
    table.sum_up()
    assert table.gradient is not None
    own, rows = table.gradient
    square = rows.norm().square()
    dist.all_reduce(square)
    return (own + table.part.start).tolist(), rows, float(square.sqrt()), exchange.num_bytes


@pytest.mark.parametrize("second", [[2, 2], [0, 0], []], ids=["ids", "padding", "none"])
def test_repeated_ids_on_two_devices_and_one_with_nothing(pool: Pool, second: list[int]) -> None:
    first = [1, 1, 4, 7, 9, 4]
    outcomes = pool.run(look_up, 2, [first, second])
    model = Sparse()
    model(torch.tensor(first + second)).square().sum().backward()
    want = model.emb.weight.grad.coalesce()  # type: ignore[union-attr]
    keep = want.indices()[0] != 0
    assert outcomes[0][0] + outcomes[1][0] == want.indices()[0][keep].tolist()
    torch.testing.assert_close(torch.cat([o[1] for o in outcomes]), want.values()[keep])
    for outcome in outcomes:
        assert outcome[2] == pytest.approx(float(want.values()[keep].norm()), rel=1e-6)


def made_in_parts(rank: int, world_size: int) -> Any:
    """A table that no device ever had in one piece, and what its owners hold of it."""
    model = nn.Sequential(nn.Embedding(10_000, 4, device="meta"))
    table = place_table(model, "0").table
    exchange = RowExchange(world_size)
    take_part(table, (0, 9_000, 10_000), rank, exchange, in_memory, seed=7)
    return table.num_bytes, gathered(table, rank, exchange)


def test_each_device_makes_its_own_part(pool: Pool) -> None:
    (large, whole), (small, nothing) = pool.run(made_in_parts, 2)
    assert (large, small, nothing) == (9_000 * 16, 1_000 * 16, None)
    torch.testing.assert_close(whole, initial_rows(0, 10_000, 4, 7))


def unannounced(rank: int, world_size: int) -> None:
    model, exchange = Sparse(), RowExchange(world_size)
    table: Table = place_table(model, "emb").table
    take_part(table, (0, 7, 20), rank, exchange, in_memory, seed=0)
    fetch([table], {"emb": lambda batch: batch}, [torch.tensor([3])], exchange)
    model(torch.tensor([4]))


def test_ids_that_the_batch_did_not_show_are_refused(pool: Pool) -> None:
    for outcome in pool.outcomes(unannounced, 2):
        assert outcome.error_type == ModelError.__name__
        assert "the table emb is asked for rows that are not among the ids found" in outcome.error


def leaves(rank: int, world_size: int) -> None:
    model, exchange = Sparse(), RowExchange(world_size)
    table = place_table(model, "emb").table
    take_part(table, (0, 7, 20), rank, exchange, in_memory, seed=0)
    if rank == 1:
        raise RuntimeError("gone")
    fetch([table], {"emb": lambda batch: batch}, [torch.tensor([3])], exchange)


def test_a_lost_device_is_an_error(pool: Pool) -> None:
    first, _ = pool.outcomes(leaves, 2)
    assert first.error_type == PeerLostError.__name__
    assert "rows of a table could not be exchanged" in first.error
