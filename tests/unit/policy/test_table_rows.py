"""Each row of a table has one giver, and who stays keeps what it has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.core.membership import HeldRows, Standing
from evener.core.plan import TablePlacement
from evener.errors import StateLostError
from evener.policy.table_rows import rows_given, rows_kept, taken_over


def standing(device: str, *ranges: tuple[int, int]) -> Standing:
    return Standing(device=device, step=3, samples_seen=0, rows={"emb": ranges} if ranges else {})


def test_rows_that_two_have_are_given_by_one() -> None:
    there = [standing("a", (0, 6)), standing("b", (4, 10)), standing("c")]
    assert rows_given(there, {"emb": 10}) == {
        "emb": (HeldRows(device="a", start=0, stop=6), HeldRows(device="b", start=6, stop=10))
    }


def test_rows_that_nobody_has() -> None:
    with pytest.raises(StateLostError, match=r"lost \(.*\) held rows of the table emb") as caught:
        rows_given([standing("a", (0, 4)), standing("c", (6, 10))], {"emb": 10})
    assert "row 4" in caught.value.numbers


def test_who_stays_keeps_its_rows_and_those_of_who_leaves_are_shared_out() -> None:
    given = rows_given([standing("a", (0, 6)), standing("b", (6, 9)), standing("c", (9, 10))], {"emb": 10})
    (table,) = rows_kept(given, ("a", "b"), {"emb": "cpu"})
    assert (table.rows, table.residence) == ({"a": 7, "b": 3}, "cpu")
    (table,) = rows_kept(given, ("a", "b", "c", "new"), {"emb": "cpu"})
    assert table.rows == {"a": 6, "b": 3, "c": 1, "new": 0}
    (table,) = rows_kept(given, ("new", "newer"), {"emb": "cpu"})
    assert table.rows == {"new": 5, "newer": 5}


def test_rows_have_the_bytes_they_had_wherever_they_go() -> None:
    """After a change of devices tables were of no size: plans filled the memory that their rows are in."""
    emb = TablePlacement(
        table="emb", rows={"a": 6, "b": 3, "c": 1}, residence="cpu", held_bytes={"a": 24, "b": 12, "c": 4}
    )
    filed = TablePlacement(table="filed", rows={"a": 10}, residence="tiered")
    found = taken_over((emb, filed), ("a", "b", "new"))
    assert [(t.table, t.rows, t.held_bytes) for t in found] == [
        ("emb", {"a": 7, "b": 3, "new": 0}, {"a": 28, "b": 12, "new": 0}),
        ("filed", {"a": 10, "b": 0, "new": 0}, {}),
    ]
    assert taken_over((), ("a",)) == ()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=8))
def test_every_row_is_given_once_by_who_has_it(held: list[tuple[int, int]]) -> None:
    there = [standing(f"d{i}", (first, min(20, first + n))) for i, (first, n) in enumerate(held)]
    ranges = {s.device: s.rows["emb"][0] for s in there}
    covered = {row for first, stop in ranges.values() for row in range(first, stop)}
    if covered != set(range(20)):
        with pytest.raises(StateLostError):
            rows_given(there, {"emb": 20})
        return
    parts = rows_given(there, {"emb": 20})["emb"]
    assert [row for p in parts for row in range(p.start, p.stop)] == list(range(20))
    assert all(ranges[p.device][0] <= p.start and p.stop <= ranges[p.device][1] for p in parts)
