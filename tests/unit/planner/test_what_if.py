"""Changed worlds are what their words say."""

import pytest

from evener.core.figures import line
from evener.core.job import Job
from evener.errors import UnknownNameError, UsageError
from evener.planner import plan
from evener.planner.what_if import World, changed
from tests.unit.planner.small import fleet_of, linear_profile


@pytest.fixture
def world():
    profile = linear_profile({"fast": 0.004, "slow": 0.012}, param_bytes=2**23)
    return World(fleet=fleet_of(["fast", "slow"], curve=line(1e-3, 1e9)), profile=profile)


def seconds(world):
    return plan(world.fleet, world.profile, Job(global_batch=16)).plan.prediction.step_s


def test_more_and_faster_helps_less_and_slower_hurts(world):
    base = seconds(world)
    assert seconds(changed(world, "add fast")) < base
    assert seconds(changed(world, "links x4")) < base
    assert seconds(changed(world, "drop h/1")) > base * 0.99
    assert seconds(changed(world, "slow h/0 x2")) > base
    assert seconds(changed(world, "drop h/1; add fast")) < base


def test_a_slowed_device_takes_twice_as_long_alone(world):
    alone = changed(world, "drop h/1")
    assert seconds(changed(alone, "slow h/0 x2")) == pytest.approx(2 * seconds(alone))


def test_a_price_is_set_and_a_host_is_named(world):
    assert changed(world, "price h/1 2.5").fleet.device("h/1").price_per_hour.value == 2.5
    assert changed(world, "add fast h").fleet.devices[-1].name == "h/added0"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("drop h/9", UnknownNameError),
        ("add tpu", UnknownNameError),
        ("slow h/0 twice", UsageError),
        ("price h/0 -1", UsageError),
        ("faster", UsageError),
        ("drop h/0; drop h/1", UsageError),
    ],
)
def test_what_cannot_be_read_is_refused(world, change, error):
    with pytest.raises(error):
        changed(world, change)
