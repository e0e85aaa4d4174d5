"""What a run looked up in its tables: ids a second, and the part of rows that each memory had."""

from collections.abc import Iterable, Sequence

from evener.core.records import StepRecord, TableRecord
from evener.report.tables import percent

WHERE = {"hot": "on the device", "host": "in host memory"}


def lookups_of(records: Iterable[StepRecord]) -> dict[str, TableRecord]:
    """By table, what all `records` together tell of the leading device's lookups."""
    found: dict[str, TableRecord] = {}
    for record in records:
        for name, told in record.tables.items():
            found[name] = found[name].plus(told) if name in found else told
    return found


def ids_per_s(tables: Iterable[TableRecord], seconds: float) -> float:
    """Ids looked up in all `tables` in each of `seconds`. Example: 300 and 100 ids in 2 s are 200."""
    return sum(t.ids for t in tables) / seconds


def hits_text(told: TableRecord) -> str:
    """Example: "12.0 % on the device, 81.0 % in host memory"; empty for a table in one memory."""
    return ", ".join(f"{percent(part)} {WHERE[name]}" for name, part in told.hit_rates.items())


def lookup_lines(tables: Sequence[tuple[str, TableRecord]], seconds: float) -> list[str]:
    """A sentence for each (table, what a device looked up in it) of `seconds` of steps."""
    lines = []
    for name, told in tables:
        rate = f"{told.ids / seconds:,.0f} ids/s ({told.rows / seconds:,.0f} rows/s)"
        hits = hits_text(told)
        found = f"; rows found {hits}" if hits else ""
        lines.append(f"table {name} on {told.device}: {rate}{found} (measured)")
    return lines
