"""Rows of placed tables when the devices change: who gives which, and who has how many from then on."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from evener.core.membership import HeldRows, Standing
from evener.core.plan import TablePlacement
from evener.core.split import apportion
from evener.errors import StateLostError

Given = Mapping[str, tuple[HeldRows, ...]]


def rows_given(
    standings: Iterable[Standing], sizes: Mapping[str, int], lost: Sequence[str] = ()
) -> dict[str, tuple[HeldRows, ...]]:
    """By table, of `sizes` rows, a device for each row. StateLostError where only `lost` devices had some.

    Example: 10 rows, a has 0 to 6, b has 4 to 10: a gives 0 to 6, b the rest.
    """
    known = tuple(standings)
    return {table: tuple(_cover(known, table, num_rows, lost)) for table, num_rows in sizes.items()}


def _cover(
    standings: Sequence[Standing], table: str, num_rows: int, lost: Sequence[str]
) -> Iterable[HeldRows]:
    at = 0
    while at < num_rows:
        held = [
            (stop, s.device) for s in standings for first, stop in s.rows.get(table, ()) if first <= at < stop
        ]
        if not held:
            raise StateLostError(
                f"only devices that are lost ({', '.join(lost)}) held rows of the table {table}",
                numbers=f"row {at} and others of {num_rows}",
                remedy="start again from the newest checkpoint: --resume",
            )
        stop, device = max(held)
        yield HeldRows(device=device, start=at, stop=stop)
        at = stop


def rows_kept(
    given: Given,
    used: Sequence[str],
    residences: Mapping[str, str | None],
    before: Sequence[TablePlacement] = (),
) -> tuple[TablePlacement, ...]:
    """Rows by device of those `used`: each keeps as many as it has, and takes of the others in that ratio.

    Where none of them has any they take equal parts. A row has as many bytes as `before`, if that is known.
    Example: a 6, b 3, c 1, and c leaves: a 7 and b 3.
    """
    row_bytes = {p.table: sum(p.held_bytes.values()) / max(sum(p.rows.values()), 1) for p in before}
    found = []
    for table, parts in given.items():
        held = [sum(p.stop - p.start for p in parts if p.device == d) for d in used]
        rows = dict(
            zip(used, apportion(parts[-1].stop, held if any(held) else [1.0] * len(used)), strict=True)
        )
        each = row_bytes.get(table, 0.0)
        found.append(
            TablePlacement(
                table=table,
                rows=rows,
                residence=residences[table],
                held_bytes={d: round(n * each) for d, n in rows.items()} if each else {},
                why="who stays keeps its rows",
            )
        )
    return tuple(found)


def taken_over(placed: Sequence[TablePlacement], stays: Sequence[str]) -> tuple[TablePlacement, ...]:
    """What `rows_kept` makes of `placed` once only devices in `stays` are there: what a plan leaves room for.

    Example: 10 rows of 4 bytes, a 6, b 3, c 1, and c goes: a holds 28 bytes, b 12.
    """
    given: dict[str, tuple[HeldRows, ...]] = {}
    for p in placed:
        ends = list(accumulate(p.rows.values()))
        given[p.table] = tuple(
            HeldRows(device=d, start=stop - n, stop=stop)
            for (d, n), stop in zip(p.rows.items(), ends, strict=True)
        )
    whole = {table: parts for table, parts in given.items() if parts and parts[-1].stop}
    return rows_kept(whole, stays, {p.table: p.residence for p in placed}, placed)
