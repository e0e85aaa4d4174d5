"""What devices cost: the user's own numbers, and a dated table that stands in for them when asked to.

    {"currency": "EUR", "per_kwh": 0.30, "prices": [
        {"name": "NVIDIA GeForce RTX 3060", "watts": 170, "buy": 210},
        {"name": "lab2/gpu0", "per_hour": 0.79},
        {"name": "lab1", "watts": 90}]}

A name is that of a device, of a kind, or of a host (what the machine itself costs as soon as one of its
devices works). The table is prices.json.
"""

from functools import cache
from pathlib import Path

import msgspec

from evener.core.catalogue import known_device
from evener.core.figures import Value

_DATA = Path(__file__).with_name("prices.json")


class Price(Value, frozen=True, kw_only=True):
    """What one device, kind or host costs; what is not known is absent.

    `per_hour` is rent, `watts` what it draws while it works, `buy` what it takes to buy one, used or new.
    """

    name: str
    per_hour: float | None = None
    watts: float | None = None
    buy: float | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a price needs the name of a device, a kind or a host")
        for field in ("per_hour", "watts", "buy"):
            value = getattr(self, field)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{field} of {self.name!r} must be 0 or more, got {value}")


class PriceList(Value, frozen=True, kw_only=True):
    """Prices in one currency. `per_kwh` is what a kilowatt hour costs; without it, power is not counted."""

    prices: tuple[Price, ...] = ()
    per_kwh: float | None = None
    currency: str = ""
    note: str = ""
    version: int = 1

    def __post_init__(self) -> None:
        if self.per_kwh is not None and not 0 <= self.per_kwh < float("inf"):
            raise ValueError(f"per_kwh must be 0 or more, got {self.per_kwh}")

    def of(self, *names: str) -> Price | None:
        """The entries of `names` as one: of each number the first that is given, earlier names first.

        Names count as a whole, in any case of letters, and so do the catalogue's aliases of a kind. None
        where no name has an entry. Example: of("lab1/gpu0", "NVIDIA GeForce RTX 3060").
        """
        found = [p for name in names for p in self.prices if _key(p.name) == _key(name)]
        if not found:
            return None
        fields = ("per_hour", "watts", "buy")
        values = {f: next((v for p in found if (v := getattr(p, f)) is not None), None) for f in fields}
        return Price(name=names[0], **values)


def _key(name: str) -> str:
    known = known_device(name)
    return (known.kind if known else name).casefold()


class QuotedPrice(Value, frozen=True, kw_only=True):
    """A kind's rent by the hour as somebody offered it: where that stood, and the day it was read."""

    kind: str
    per_hour: float
    source: str
    read_on: str


class Quotes(Value, frozen=True, kw_only=True):
    """All that is in prices.json."""

    currency: str
    prices: tuple[QuotedPrice, ...]


@cache
def quotes() -> Quotes:
    """The table of rents, read once."""
    return msgspec.json.decode(_DATA.read_bytes(), type=Quotes)


def quoted(kind: str) -> QuotedPrice | None:
    """The table's rent of a kind or alias, whole name, any case; None where it has none."""
    return next((q for q in quotes().prices if _key(q.kind) == _key(kind)), None)
