"""A table goes where it costs least and fits; where it fits nowhere the sum is told."""

import pytest

from evener.core.figures import Figure, line
from evener.core.fleet import Device, Fleet, Link
from evener.core.tables import TableUse
from evener.errors import NoPlanFitsError
from evener.planner.tables import place_table

GIB = 2**30


def fleet(*gib: float) -> Fleet:
    devices = tuple(
        Device(
            name=f"lab/{i}",
            kind=f"kind {i}",
            memory_bytes=Figure(value=g * GIB, source="assumed"),
            bytes_per_s=Figure(value=1e10, source="assumed"),
        )
        for i, g in enumerate(gib)
    )
    return Fleet(devices=devices, links=(Link(a="lab", b="lab", curve=line(1e-4, 1e9)),))


def test_a_large_table_is_looked_up_in_parts_by_budget() -> None:
    use = TableUse(name="emb", num_rows=2_000_000, dim=64, distinct=0.54)
    choice = place_table(use, fleet(5, 3, 2), ("lab/0", "lab/1", "lab/2"), 4096)
    assert choice.placement.rows == {"lab/0": 1_000_000, "lab/1": 600_000, "lab/2": 400_000}
    assert choice.placement.residence == "cpu"
    assert choice.why.startswith("table emb: 2212 of 2000000 rows a step,")


def test_a_small_table_that_every_step_touches_in_full_is_dense() -> None:
    use = TableUse(name="emb", num_rows=50, dim=8, ids_per_sample=10)
    choice = place_table(use, fleet(1), ("lab/0",), 64)
    assert choice.placement.residence == "dense"
    assert "looked up in host memory" in choice.why


def test_a_table_of_twice_the_largest_memory_fits_in_parts() -> None:
    use = TableUse(name="emb", num_rows=GIB // 256, dim=64)
    devices = ("lab/0", "lab/1", "lab/2")
    choice = place_table(use, fleet(1, 0.8, 0.6), devices, 64)
    assert sum(choice.placement.rows.values()) == use.num_rows
    assert choice.why.endswith("which does not fit")


def test_a_table_larger_than_all_memory_is_refused_with_the_sum() -> None:
    use = TableUse(name="emb", num_rows=GIB // 64, dim=64)
    with pytest.raises(NoPlanFitsError, match="the table emb is larger than all memory") as caught:
        place_table(use, fleet(1, 1), ("lab/0", "lab/1"), 64)
    assert caught.value.numbers == "4 GiB with its optimiser's state; lab/0 0.5, lab/1 0.5: 1 GiB"
    assert "tiered" in caught.value.remedy
