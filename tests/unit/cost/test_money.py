"""Rates from the user's numbers, the fleet's, and the table; worked sums."""

import re

import pytest

from evener.core.catalogue import known_device
from evener.core.figures import Figure
from evener.core.fleet import Device, Fleet
from evener.core.prices import Price, PriceList, quoted, quotes
from evener.cost.money import payback_hours, per_million, rates_of, saved_per_hour, unused
from evener.errors import UsageError

RTX = "NVIDIA GeForce RTX 3060"


def fleet(*devices):
    return Fleet(devices=devices)


def test_the_worked_numbers_of_the_docstrings():
    assert per_million(1.80, 100) == pytest.approx(5.0)
    assert saved_per_hour(2.0, 100, 2.06, 125) == pytest.approx(0.44)
    assert payback_hours(220, 0.44) == pytest.approx(500)
    assert payback_hours(220, 0.0) is None
    assert payback_hours(220, -0.1) is None


def test_own_devices_cost_their_power_and_rented_ones_their_rent():
    here = fleet(
        Device(name="a/0", kind=RTX, watts=Figure(value=170, source="table")),
        Device(name="a/1", kind="x", price_per_hour=Figure(value=0.5, source="assumed")),
    )
    rates = rates_of(here, PriceList(per_kwh=0.30))
    assert rates.devices == pytest.approx({"a/0": 0.051, "a/1": 0.5})
    assert rates.power == pytest.approx({"a/0": 0.051, "a/1": 0.0})
    assert any("170 W" in n for n in rates.notes)


def test_the_users_numbers_go_first_by_device_then_by_kind():
    here = fleet(*(Device(name=f"a/{i}", kind=RTX) for i in range(2)))
    prices = PriceList(
        prices=(Price(name="a/1", per_hour=0.9), Price(name="rtx 3060", per_hour=0.1)), currency="EUR"
    )
    rates = rates_of(here, prices, stand_in=True)
    assert rates.devices == {"a/0": 0.1, "a/1": 0.9}
    assert rates.currency == "EUR"
    assert not any("stand-in" in n for n in rates.notes)


def test_power_of_a_rented_device_counts_only_where_its_watts_are_the_users():
    device = Device(
        name="a/0",
        kind=RTX,
        price_per_hour=Figure(value=0.5, source="assumed"),
        watts=Figure(value=170, source="table"),
    )
    assert rates_of(fleet(device), PriceList(per_kwh=0.3)).devices["a/0"] == 0.5
    listed = PriceList(per_kwh=0.3, prices=(Price(name=RTX, watts=200),))
    assert rates_of(fleet(device), listed).devices["a/0"] == pytest.approx(0.56)


def test_a_host_costs_once_and_only_when_it_works():
    here = fleet(*(Device(name=n, kind="x") for n in ("a/0", "a/1", "b/0")))
    prices = PriceList(
        per_kwh=0.5, prices=(Price(name="x", per_hour=1.0), Price(name="a", per_hour=0.2, watts=100))
    )
    rates = rates_of(here, prices)
    assert rates.per_hour(["a/0", "a/1"]) == pytest.approx(2.25)
    assert rates.per_hour(["b/0"]) == pytest.approx(1.0)


def test_a_bought_device_has_no_rent():
    device = Device(name="a/0", kind=RTX, price_per_hour=Figure(value=0.5, source="assumed"))
    rates = rates_of(fleet(device), PriceList(prices=(Price(name=RTX, buy=210),)), owned=["a/0"])
    assert rates.devices == {"a/0": 0.0}
    assert any("power of a/0" in n for n in rates.notes)


def test_the_table_stands_in_only_when_asked_and_says_so():
    here = fleet(Device(name="a/0", kind=RTX))
    with pytest.raises(UsageError, match="a/0") as refused:
        rates_of(here, PriceList())
    assert "--stand-in" in refused.value.remedy
    rates = rates_of(here, PriceList(), stand_in=True)
    assert rates.devices == {"a/0": quoted(RTX).per_hour}
    assert rates.currency == "USD"
    assert any("not your price" in n and quoted(RTX).read_on in n for n in rates.notes)
    with pytest.raises(UsageError, match="nor in the table"):
        rates_of(fleet(Device(name="a/0", kind="unheard of")), PriceList(), stand_in=True)


def test_a_misspelt_name_is_told():
    here = fleet(Device(name="a/0", kind=RTX))
    assert unused(here, PriceList(prices=(Price(name="RTX 3060", buy=1),))) == ()
    assert "a/9" in unused(here, PriceList(prices=(Price(name="a/9", buy=1),)))[0]


@pytest.mark.parametrize("row", quotes().prices, ids=lambda q: q.kind)
def test_every_row_of_the_table_has_a_known_kind_a_source_and_a_day(row):
    known = known_device(row.kind)
    assert known is not None and known.kind == row.kind
    assert 0 < row.per_hour < 20 and row.source
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", row.read_on)
    assert len([q for q in quotes().prices if q.kind == row.kind]) == 1


@pytest.mark.parametrize("wrong", [{"per_hour": -1.0}, {"watts": float("nan")}, {"buy": float("inf")}])
def test_prices_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match="0 or more"):
        Price(name="a", **wrong)
