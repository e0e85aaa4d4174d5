"""The worked numbers of what a table costs."""

import pytest

from evener.core.figures import line
from evener.core.tables import TableUse
from evener.cost.tables import dense, looked_up

USE = TableUse(name="emb", num_rows=2_000_000, dim=64, distinct=2192 / 4096)


def test_rows_in_host_memory() -> None:
    price = looked_up(USE, 4096, memory_bytes_per_s=1e10, bus=None, hops=(None,))
    assert price.total_s == pytest.approx(2192 * 1792 / 1e10)
    assert price.held_bytes == 512_000_000


def test_rows_over_a_bus_and_to_other_owners() -> None:
    price = looked_up(USE, 4096, memory_bytes_per_s=1e10, bus=line(1e-5, 1e10), hops=(line(1e-4, 1e9),) * 2)
    assert price.transfer_s == pytest.approx(2 * (1e-5 + 2192 * 256 / 1e10))
    assert price.exchange_s == pytest.approx(1e-4 + 2192 / 4 * 524 / 1e9)


def test_dense_gradients() -> None:
    price = dense(USE, memory_bytes_per_s=1e10, hops=(None,))
    assert price.total_s == pytest.approx(0.2048)
    assert price.held_bytes == 1_024_000_000
    two = dense(USE, memory_bytes_per_s=1e10, hops=(line(1e-3, 1e9),) * 2)
    assert two.exchange_s == pytest.approx(2 * (1e-3 + 256e6 / 1e9))


def test_more_ids_than_rows_touch_every_row_once() -> None:
    small = TableUse(name="emb", num_rows=100, dim=4, ids_per_sample=3)
    assert small.touched(10) == 30
    assert small.touched(1000) == 100
    assert TableUse(name="a", num_rows=2_000_000, dim=64, state_numbers=128).held_bytes == 1_536_000_000


@pytest.mark.parametrize(
    "wrong", [{"num_rows": 0}, {"distinct": 0.0}, {"distinct": 1.5}, {"ids_per_sample": 0}]
)
def test_tables_that_are_none(wrong: dict) -> None:
    with pytest.raises(ValueError, match="the table 'emb'"):
        TableUse(**({"name": "emb", "num_rows": 5, "dim": 2} | wrong))
