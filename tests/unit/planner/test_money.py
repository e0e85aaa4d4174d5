"""Money: the cheapest step, time under a budget, and limits that clash."""

import pytest

from evener.core.figures import line
from evener.core.fleet import Device, Fleet, Link
from evener.core.job import Job
from evener.errors import NoPlanFitsError, UsageError
from evener.planner import plan
from tests.unit.planner.small import figure, linear_profile
from tests.unit.planner.test_whole import chain


def priced(*kinds_and_prices):
    devices = tuple(
        Device(name=f"h/{i}", kind=k, price_per_hour=figure(p) if p else None, memory_bytes=figure(1e10))
        for i, (k, p) in enumerate(kinds_and_prices)
    )
    return Fleet(devices=devices, links=(Link(a="h", b="h", curve=line(1e-6, 1e12)),))


FLEET = priced(("fast", 8.0), ("slow", 1.0), ("slow", 1.0))
PROFILE = linear_profile({"fast": 0.01, "slow": 0.03})


@pytest.mark.parametrize("shapes", ["data-parallel", "all"])
def test_the_cheapest_devices_are_taken(shapes):
    """A sample costs 0.08 on the fast device and 0.03 on a slow one (in hour-priced seconds)."""
    profile = PROFILE if shapes == "data-parallel" else chain({"fast": 0.01, "slow": 0.03})
    result = plan(FLEET, profile, Job(global_batch=12, objective="money"), shapes=shapes)
    assert "h/0" not in result.plan.devices
    timed = plan(FLEET, profile, Job(global_batch=12), shapes=shapes)
    assert "h/0" in timed.plan.devices
    assert timed.plan.prediction.step_s < result.plan.prediction.step_s


def test_the_cheapest_within_a_time():
    fast_enough = Job(global_batch=12, objective="money", max_step_s=0.1)
    result = plan(FLEET, PROFILE, fast_enough)
    assert result.plan.prediction.step_s <= 0.1
    assert "h/0" in result.plan.devices


@pytest.mark.parametrize("shapes", ["data-parallel", "all"])
def test_the_fastest_within_a_price(shapes):
    profile = PROFILE if shapes == "data-parallel" else chain({"fast": 0.01, "slow": 0.03})
    result = plan(FLEET, profile, Job(global_batch=12, max_price_per_hour=2.5), shapes=shapes)
    assert set(result.plan.devices) == {"h/1", "h/2"}


@pytest.mark.parametrize("shapes", ["data-parallel", "all"])
def test_limits_that_clash_are_named(shapes):
    profile = PROFILE if shapes == "data-parallel" else chain({"fast": 0.01, "slow": 0.03})
    job = Job(global_batch=12, max_price_per_hour=2.5, max_step_s=0.1, objective="money")
    with pytest.raises(NoPlanFitsError, match=r"limits.*2\.5 an hour|limits: 0\.1 s a step, 2\.5 an hour"):
        plan(FLEET, profile, job, shapes=shapes)


def test_a_price_that_is_not_known_is_named():
    with pytest.raises(UsageError, match="h/1"):
        plan(priced(("fast", 8.0), ("slow", None)), PROFILE, Job(global_batch=12, objective="money"))


def test_money_for_many_devices():
    fleet = priced(*[("fast", 8.0)] * 10, *[("slow", 1.0)] * 10)
    profile = chain({"fast": 0.01, "slow": 0.03})
    cheap = plan(fleet, profile, Job(global_batch=64, objective="money"), shapes="all")
    kinds = {fleet.device(n).kind for n in cheap.plan.devices}
    assert kinds == {"slow"}
    limited = plan(fleet, profile, Job(global_batch=64, max_price_per_hour=30.0), shapes="all")
    assert sum(fleet.device(n).price_per_hour.value for n in limited.plan.devices) <= 30


def test_a_device_that_a_limit_on_price_leaves_out_is_told_by_its_price():
    """It said that a step takes 30 ms with it and 90 ms without, as if that were a reason."""
    result = plan(FLEET, PROFILE, Job(global_batch=12, max_price_per_hour=2.0))
    reasons = {x.device: x.reason for x in result.left_out}
    assert reasons == {"h/0": "with it an hour costs 10, the limit is 2"}
    notes = {a.name: a.note for a in result.alternatives}
    assert notes["best single device"] == "8 an hour, over the limit"
    assert notes["even data parallel"] == "10 an hour, over the limit"


def test_a_device_that_is_too_dear_is_told_by_what_a_step_costs():
    result = plan(FLEET, PROFILE, Job(global_batch=12, objective="money"))
    reason = next(x.reason for x in result.left_out if x.device == "h/0")
    assert reason.count(" and costs ") == 2, reason
