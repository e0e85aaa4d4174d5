"""Sets of devices and their prices, worked by hand; what a device is worth."""

import pytest
from msgspec.structs import replace

from evener.core.figures import Figure
from evener.core.job import Job
from evener.cost.money import Rates
from evener.errors import NoPlanFitsError, UsageError
from evener.planner import plan
from evener.planner.offers import Limits, Offer, cheapest, fastest, offers
from evener.planner.worth import worth_of
from tests.unit.planner.small import fleet_of, linear_profile

KINDS = {"fast": 0.01, "slow": 0.03}
JOB = Job(global_batch=12)


def found_for(kinds, prices, *, most=256, memory=None, bytes_per_sample=0.0):
    fleet = fleet_of(kinds, memory=memory)
    profile = linear_profile(KINDS, bytes_per_sample=bytes_per_sample)
    rates = Rates(devices={d.name: prices[d.kind] for d in fleet.devices})
    devices = tuple(
        replace(d, price_per_hour=Figure(value=prices[d.kind], source="assumed")) for d in fleet.devices
    )
    priced = replace(fleet, devices=devices)
    job = replace(JOB, memory_margin=0.0, allow=("unlinked",))

    def solve(names, limit):
        return plan(priced.only(names), profile, replace(job, max_price_per_hour=limit))

    return offers(fleet, profile, job, rates, solve, most=most)


def test_three_sets_by_hand():
    """Alone the fast device takes 0.12 s and the slow one 0.36 s; together 9 and 3 samples take 0.09 s.

    At 8 and 1 an hour: 0.96, 0.36 and 0.81 hour-priced seconds for 12 samples.
    """
    found = found_for(["fast", "slow"], {"fast": 8.0, "slow": 1.0})
    assert (found.sets, found.of, found.misfits) == (3, 3, 0)
    by_set = {o.devices: o for o in found.offers}
    assert by_set["h/0",].per_million == pytest.approx(0.96 / 3600 / 12 * 1e6)
    assert by_set["h/1",].per_million == pytest.approx(0.36 / 3600 / 12 * 1e6)
    assert by_set["h/0", "h/1"].per_million == pytest.approx(0.81 / 3600 / 12 * 1e6)
    assert [o.devices for o in found.sensible] == [("h/0", "h/1"), ("h/1",)]
    assert cheapest(found.offers, Limits(samples=12.0, deadline_s=0.2)).devices == ("h/0", "h/1")
    assert cheapest(found.offers, Limits()).devices == ("h/1",)
    assert fastest(found.offers, Limits(samples=12.0, budget=0.5 / 3600)).devices == ("h/1",)
    assert fastest(found.offers, Limits(samples=12.0, budget=0.3 / 3600)) is None
    assert cheapest(found.offers, Limits(samples=12.0, deadline_s=0.05)) is None


def test_devices_that_are_alike_count_by_number():
    found = found_for(["slow"] * 5, {"slow": 1.0})
    assert (found.sets, found.of) == (5, 5)
    assert [len(o.devices) for o in found.offers] == [4, 3, 2, 1]  # 12 samples in fives are no faster: 3 each


def test_too_many_sets_are_cut_short_and_counted():
    found = found_for(["fast"] * 6 + ["slow"] * 6, {"fast": 8.0, "slow": 1.0}, most=20)
    assert found.of == 48 and found.sets == 18 and not found.complete
    assert any(len(o.devices) == 1 for o in found.offers)
    assert cheapest(found.offers, Limits()).per_million == pytest.approx(1.0 * 0.03 / 3600 * 1e6)


def test_sets_that_cannot_hold_the_model_are_counted_and_none_is_an_error():
    with pytest.raises(NoPlanFitsError):
        found_for(["fast"], {"fast": 1.0}, memory=1e3, bytes_per_sample=1e6)


@pytest.mark.parametrize("wrong", [{"budget": 5.0}, {"deadline_s": 5.0}, {"samples": 0.0}])
def test_limits_need_the_size_of_the_job(wrong):
    with pytest.raises(UsageError):
        Limits(**wrong)


def offer(samples_per_s, per_hour):
    return Offer(
        devices=("a/0",),
        step_s=1.0,
        samples_per_s=samples_per_s,
        per_hour=per_hour,
        per_million=per_hour / 3600 / samples_per_s * 1e6,
    )


def test_a_used_card_is_paid_back_after_500_hours():
    worth = worth_of("a/1", offer(100, 2.0), offer(125, 2.06), Rates(devices={}), buy=220)
    assert worth.gain == pytest.approx(0.25)
    assert worth.extra_per_hour == pytest.approx(0.06)
    assert worth.payback_hours == pytest.approx(500)
    assert worth.worth and "500 hours" in worth.sentence


def test_a_card_that_draws_more_than_it_brings_is_never_paid_back():
    worth = worth_of("a/1", offer(100, 0.10), offer(110, 0.15), Rates(devices={}), buy=50)
    assert worth.payback_hours is None and not worth.worth
    assert "never paid back" in worth.sentence
    waited = worth_of(
        "a/1", offer(100, 0.10), offer(110, 0.15), Rates(devices={}), buy=50, waiting_per_hour=2
    )
    assert waited.saved_per_hour == pytest.approx(2.10 * 1.1 - 2.15)
    assert waited.payback_hours == pytest.approx(50 / 0.16)


def test_a_card_that_makes_nothing_faster_is_not_worth_having():
    worth = worth_of("a/1", offer(100, 1.0), offer(100, 1.0), Rates(devices={}), buy=1)
    assert not worth.worth and "no faster" in worth.sentence
