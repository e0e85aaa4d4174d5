"""Words of messages."""

from collections.abc import Sequence


def counted(number: int, word: str) -> str:
    """A number with its word. Examples: "1 device", "0 devices", "2 kinds"."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def some(names: Sequence[str], most: int) -> str:
    """The first `most` of `names`, and how many there are beside. Example: "a, b and 3 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def in_bytes(number: float, digits: int = 3) -> str:
    """So many bytes in the largest binary unit that fits. Examples: "17.7 GiB", "58.2 TiB", "12 B"."""
    for power, unit in ((5, "PiB"), (4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        value = number / 2 ** (10 * power)
        if value >= 1:
            return f"{value:.{digits}g} {unit}" if value < 10**digits - 0.5 else f"{value:.0f} {unit}"
    return f"{number:.0f} B"


_TIMES = ((1e6, 1e3, "µs"), (1e3, 1e3, "ms"), (1.0, 1e3, "s"), (1 / 60, 120.0, "min"), (1 / 3600, 48.0, "h"))
"""(units a second, the least that is told in the next one, unit)."""


def in_time(seconds: float, digits: int = 3) -> str:
    """Seconds in a unit that suits. Examples: "65.1 ms", "12.3 s", "57.5 min", "26.4 h", "1,157 days"."""
    for factor, most, unit in _TIMES:
        told = float(f"{seconds * factor:.{digits}g}")  # 999.7 ms are 1 s
        if abs(told) < most and (seconds or unit == "s"):
            return f"{told:g} {unit}"
    return f"{seconds / 86_400:,.0f} days"


def printable(text: str) -> str:
    """`text` for a terminal, where a file of others could hold commands: what cannot be seen is replaced.

    Example: a string of "a", the escape character and "b" becomes "a�b".
    """
    return "".join(c if c.isprintable() else "�" for c in text)
