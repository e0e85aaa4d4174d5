"""Cells and columns from numbers, so that every table words them alike."""

from evener.report.page.document import Cell, Column
from evener.report.tables import amount, percent, size, unit_for

MOST_TEXT = 2000
"""Characters of a name or sentence that a page shows; a longer one ends in an ellipsis."""


def short(text: str, most: int = MOST_TEXT) -> str:
    """`text`, cut to `most` characters. Example: short("abcdef", 4) is "abc…"."""
    return text if len(text) <= most else text[: most - 1] + "…"


def word(text: str) -> Cell:
    """A cell of text."""
    return Cell(text=short(text))


def number(value: float | None, form: str = ".4g") -> Cell:
    """A cell with a number in the format `form`; a dash where there is none."""
    return Cell(text="–") if value is None else Cell(text=f"{value:{form}}", value=value)


def part(value: float, *, sign: bool = False) -> Cell:
    """A cell with a ratio as per cent. Example: 0.5 is "50.0 %"."""
    return Cell(text=percent(value, sign=sign), value=value)


def memory(value: float | None) -> Cell:
    """A cell with bytes in powers of 1024. Example: "1.5 GiB"."""
    return Cell(text="–") if value is None else Cell(text=size(value), value=value)


def seconds(value: float, factor: float) -> Cell:
    """A cell with seconds times `factor`; the value stays in seconds."""
    return Cell(text=amount(value, factor), value=value)


def columns(*titles: str | tuple[str, str]) -> tuple[Column, ...]:
    """Columns from titles: a plain one is of text, (title, unit) of numbers."""
    return tuple(
        Column(title=t) if isinstance(t, str) else Column(title=t[0], unit=t[1], numeric=True) for t in titles
    )


__all__ = ["columns", "memory", "number", "part", "seconds", "short", "unit_for", "word"]
