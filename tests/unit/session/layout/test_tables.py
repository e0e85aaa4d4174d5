"""A run refuses tables that the memory of its devices has no room for, before it makes a row."""

import pytest
from torch import nn

from evener.core.figures import Figure
from evener.core.fleet import Device, Fleet
from evener.core.plan import TablePlacement
from evener.errors import NoPlanFitsError
from evener.runtime.tables.layer import place_table
from evener.session.layout.job_tables import check_room
from evener.session.layout.tables import TIERED

ROWS, ROW_BYTES = 1000, 64 * 4


def check(residence: str, types: tuple[str, str], *held: float | None) -> None:
    """Half of the table on each of two devices that hold so many bytes (None: nobody knows)."""
    devices = tuple(
        Device(
            name=f"lab{i}/d",
            kind="some",
            type=kind,
            memory_bytes=None if size is None else Figure(value=size, source="assumed"),
        )
        for i, (kind, size) in enumerate(zip(types, held, strict=True))
    )
    model = nn.Sequential(nn.Embedding(ROWS, 64, device="meta"))
    rows = {"lab0/d": ROWS // 2, "lab1/d": ROWS // 2}
    where = TablePlacement(table="0", rows=rows, residence=residence)
    check_room(place_table(model, "0").table, where, Fleet(devices=devices))


HALF = ROWS * ROW_BYTES / 2


@pytest.mark.parametrize(
    ("residence", "types"), [("cpu", ("cpu", "cpu")), ("device", ("cuda", "cuda"))], ids=["host", "device"]
)
def test_a_table_may_be_as_large_as_all_memory_and_no_larger(residence: str, types: tuple[str, str]) -> None:
    check(residence, types, HALF, HALF)
    with pytest.raises(NoPlanFitsError, match="the table 0 is larger than all memory"):
        check(residence, types, HALF, HALF - 1)


@pytest.mark.parametrize(
    ("residence", "types", "second"),
    [(TIERED, ("cpu", "cpu"), 1.0), ("cpu", ("cpu", "cuda"), 1.0), ("cpu", ("cpu", "cpu"), None)],
    ids=["in a file", "a host of which only the accelerator is known", "memory that nobody measured"],
)
def test_where_memory_is_not_known_or_not_needed_nothing_is_refused(
    residence: str, types: tuple[str, str], second: float | None
) -> None:
    check(residence, types, 1.0, second)


def test_the_memory_of_an_accelerators_host_counts_where_it_is_known() -> None:
    card = Device(name="lab/gpu0", kind="some", type="cuda")
    host = Device(name="lab/cpu", kind="host", memory_bytes=Figure(value=2 * HALF - 1, source="assumed"))
    fleet = Fleet(devices=(card,)).with_hosts((host,))
    table = place_table(nn.Sequential(nn.Embedding(ROWS, 64, device="meta")), "0").table
    where = TablePlacement(table="0", rows={"lab/gpu0": ROWS}, residence="cpu")
    with pytest.raises(NoPlanFitsError, match="the table 0 is larger than all memory") as caught:
        check_room(table, where, fleet)
    assert "lab/cpu" in caught.value.numbers
