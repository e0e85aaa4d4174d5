"""Numbers as words and rows as aligned text, alike in every report."""

from collections.abc import Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evener.core.figures import Figure
from evener.core.words import in_bytes, in_time

_UNITS = ((10.0, 1.0, "s"), (1e-2, 1e3, "ms"), (0.0, 1e6, "µs"))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> Table:
    """Aligned rows under `header`: the first `left` columns to the left, the others to the right.

    Cells are taken literally: a name with brackets is no markup.
    """
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(header))
    for number, title in enumerate(header):
        result.add_column(Text(title), justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        result.add_row(*map(Text, row))
    return result


def render(*parts: str | Table) -> str:
    """`parts` below each other as plain text: no colours, no wrapping, no spaces at line ends."""
    buffer = StringIO()
    console = Console(
        file=buffer, width=10_000, color_system=None, markup=False, highlight=False, emoji=False
    )
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    return "".join(line.rstrip() + "\n" for line in buffer.getvalue().splitlines())


def unit_for(seconds: float) -> tuple[float, str]:
    """(factor, unit) that makes a table of times up to `seconds` readable: (1000, "ms") for 1.2 s."""
    return next((factor, unit) for above, factor, unit in _UNITS if seconds >= above)


def amount(seconds: float, factor: float) -> str:
    """Seconds times `factor` with two decimals, never "-0.00". Example: amount(0.05, 1000) is "50.00"."""
    return f"{round(seconds * factor, 2) + 0.0:.2f}"


def duration(seconds: float) -> str:
    """Seconds in words, four digits. Examples: "1.2 s", "123.4 ms", "56.7 µs", "57.5 min"."""
    return in_time(seconds, 4)


def clock_time(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss. Examples: "1:02:03", "0:45"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def percent(part: float, *, sign: bool = False) -> str:
    """A ratio as per cent. Examples: 0.05 is "5.0 %", with `sign` "+5.0 %".

    With `sign` it is a difference, and from +1000 % on told as a multiple: 153 is "154 x".
    """
    if sign and part >= 10:
        return f"{1 + part:.4g} x"
    return f"{100 * part:+.1f} %" if sign else f"{100 * part:.1f} %"


def size(num_bytes: float) -> str:
    """Bytes in powers of 1024, four digits. Examples: "512 B", "1.5 GiB"."""
    return in_bytes(num_bytes, 4)


def sourced(figure: Figure) -> str:
    """Where a figure comes from, with its spread. Example: "measured ± 1.0 %"."""
    return f"{figure.source} ± {percent(figure.spread)}" if figure.spread else figure.source
