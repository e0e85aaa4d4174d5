"""What an hour of devices costs, what a million samples cost, and when a bought device has paid."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from evener.core.catalogue import known_device
from evener.core.fleet import Device, Fleet
from evener.core.prices import PriceList, quoted, quotes
from evener.core.words import some
from evener.errors import UsageError

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Money per hour by device, rent and power together, and by host for the machines themselves.

    `power` is the part of each that is power. `notes` says what was counted, what was not, and what nobody
    measured.
    """

    devices: dict[str, float]
    hosts: dict[str, float] = field(default_factory=dict)
    power: dict[str, float] = field(default_factory=dict)
    currency: str = ""
    notes: tuple[str, ...] = ()

    def per_hour(self, names: Iterable[str]) -> float:
        """What an hour of these devices costs, with the hosts they are on.

        Example: two devices of 1.50 and 0.30 on a host of 0.20 cost 2.00.
        """
        held = tuple(names)
        hosts = {name.partition("/")[0] for name in held}
        return sum(self.devices[n] for n in held) + sum(self.hosts.get(h, 0.0) for h in hosts)

    def money(self, amount: float) -> str:
        """An amount in words. Example: "2.35 EUR", "0.0047 EUR"."""
        digits = f"{amount:.2f}" if abs(amount) >= 1 else f"{amount:.3g}"
        return f"{digits} {self.currency}".strip()


def rates_of(
    fleet: Fleet, prices: PriceList, *, stand_in: bool = False, owned: Collection[str] = ()
) -> Rates:
    """What each device of `fleet` costs an hour: from `prices`, else from the fleet file.

        rate = rent + watts / 1000 · price of a kWh

    A device without rent is the user's own and costs its power. A rented one costs its rent; its power counts
    as well only where the list or the fleet file gives its watts: rents usually include it. Devices named in
    `owned` are not rented, whatever the list says. `stand_in` takes a rent from the dated table for devices
    of which nothing is known. UsageError names devices whose cost is unknown.
    Example: 170 W at 0.30 a kWh cost 0.051 an hour.
    """
    notes: dict[str, None] = {}
    devices, power, unknown = {}, {}, []
    for device in fleet.devices:
        rate = _own(device, prices, notes) if device.name in owned else _rented(device, prices, notes)
        if rate is None and stand_in and device.name not in owned:
            rate = _quoted(device, notes)
        if rate is None:
            unknown.append(device.name)
        else:
            devices[device.name] = sum(rate)
            power[device.name] = rate[1]
    if unknown:
        raise _unknown(unknown, prices, stand_in)
    hosts = {}
    for host in dict.fromkeys(d.host for d in fleet.devices):
        entry = prices.of(host)
        if entry is not None:
            hosts[host] = (entry.per_hour or 0.0) + _power(entry.watts, prices)
    if not hosts:
        notes[
            "not counted: what the machines around the devices cost; a host's name in the prices adds it"
        ] = None
    return Rates(
        devices=devices,
        hosts=hosts,
        power=power,
        currency=_currency(prices, stand_in),
        notes=tuple(notes),
    )


def _own(device: Device, prices: PriceList, notes: dict[str, None]) -> tuple[float, float]:
    """(0, power) an hour of a device that its user has."""
    watts, from_table = _watts(device, prices)
    if watts is None or prices.per_kwh is None:
        missing = "its watts are not known" if watts is None else "no price of a kWh is given"
        notes[f"not counted: the power of {device.name}, {missing}"] = None
        return 0.0, 0.0
    if from_table:
        notes[f"table: {device.kind} draws {watts:g} W, the board's limit; a meter shows less"] = None
    return 0.0, _power(watts, prices)


def _rented(device: Device, prices: PriceList, notes: dict[str, None]) -> tuple[float, float] | None:
    """(rent, power) an hour; the device's own power where it has no rent; None where neither is known."""
    entry = prices.of(device.name, device.kind)
    rent = entry.per_hour if entry else None
    if rent is None and device.price_per_hour is not None:
        rent = device.price_per_hour.value
    watts, from_table = _watts(device, prices)
    if rent is not None:
        return rent, 0.0 if from_table else _power(watts, prices)
    return None if watts is None or prices.per_kwh is None else _own(device, prices, notes)


def _watts(device: Device, prices: PriceList) -> tuple[float | None, bool]:
    """(watts, whether they are the catalogue's)."""
    entry = prices.of(device.name, device.kind)
    if entry is not None and entry.watts is not None:
        return entry.watts, False
    return (None, False) if device.watts is None else (device.watts.value, device.watts.source == "table")


def _quoted(device: Device, notes: dict[str, None]) -> tuple[float, float] | None:
    quote = quoted(device.kind)
    if quote is None:
        return None
    notes[
        f"stand-in, not your price: {device.kind} at {quote.per_hour:g} {quotes().currency} an hour "
        f"({quote.source}, read {quote.read_on})"
    ] = None
    return quote.per_hour, 0.0


def _power(watts: float | None, prices: PriceList) -> float:
    return 0.0 if watts is None or prices.per_kwh is None else watts / 1000 * prices.per_kwh


def _currency(prices: PriceList, stand_in: bool) -> str:
    if prices.currency or not stand_in:
        return prices.currency
    return quotes().currency


def _unknown(names: list[str], prices: PriceList, stand_in: bool) -> UsageError:
    table = "" if stand_in else ", or --stand-in for a dated table of rents"
    return UsageError(
        f"no price is known of {some(names, 5)}{', nor in the table of rents' if stand_in else ''}",
        numbers="" if prices.per_kwh is not None else "no price of a kWh is given, so watts cost nothing",
        remedy=(
            "--price NAME=0.79 (an hour of a device or kind), --watts NAME=170 with --per-kwh 0.30, --prices "
            f"FILE, price_per_hour in the fleet file{table}"
        ),
    )


def unused(fleet: Fleet, prices: PriceList) -> tuple[str, ...]:
    """Entries of the list that meet nothing in the fleet: a misspelt name would otherwise be silent."""
    here = {n.casefold() for d in fleet.devices for n in (d.name, d.host, d.kind)}
    found = []
    for price in prices.prices:
        known = known_device(price.name)
        if not {price.name.casefold(), (known.kind if known else price.name).casefold()} & here:
            found.append(f"the price of {price.name!r} was not used: no device, kind or host has that name")
    return tuple(found)


def per_million(per_hour: float, samples_per_s: float) -> float:
    """Money for a million samples: per_hour / 3600 / samples_per_s · 1e6.

    Example: 1.80 an hour at 100 samples/s are 5.00.
    """
    return per_hour / HOUR_S / samples_per_s * 1e6


def saved_per_hour(
    before_per_hour: float, before_samples_per_s: float, after_per_hour: float, after_samples_per_s: float
) -> float:
    """What an hour of the changed fleet saves: what its work would have cost before, less what it costs now.

        saved = before · (samples/s after ÷ before) - after

    Negative where the change makes samples dearer. Example: a fleet of 2.00 an hour that gets a quarter
    faster for 0.06 of power: 2.00 · 1.25 - 2.06 = 0.44.
    """
    return before_per_hour * after_samples_per_s / before_samples_per_s - after_per_hour


def payback_hours(buy: float, saved_an_hour: float) -> float | None:
    """Hours of training after which a price paid once is saved; None where it never is.

    Example: a used card of 220 that saves 0.44 an hour: 500 hours.
    """
    return buy / saved_an_hour if saved_an_hour > 0 else None
