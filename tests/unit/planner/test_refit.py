"""Links and memory that are changed one by one."""

import pytest

from evener.core.figures import line
from evener.errors import UnknownNameError, UsageError
from evener.planner.refit import with_faster_link, with_link, with_memory
from evener.planner.what_if import World, changed
from tests.unit.planner.small import fleet_of, linear_profile


@pytest.fixture
def fleet():
    return fleet_of(["a", "b"], memory=8.0, curve=line(1e-3, 1e9))


def test_a_link_is_made_faster_or_becomes_another(fleet):
    assert with_faster_link(fleet, "h", "h", 2).link("h/0", "h/1").curve.seconds(1e6) == pytest.approx(1e-3)
    other = with_link(fleet, "h", "h", "1 Gbit/s Ethernet")
    assert len(other.links) == 1
    assert other.link("h/0", "h/1").curve.seconds(1e6) == pytest.approx(0.009, rel=0.01)
    own = with_link(fleet, "h/0", "h/1", "1 Gbit/s Ethernet")
    assert len(own.links) == 2


def test_in_words(fleet):
    world = World(fleet=fleet, profile=linear_profile({"a": 1.0, "b": 1.0}))
    assert changed(world, "link h h x4").fleet.links[0].curve.seconds(1e6) == pytest.approx(0.5e-3)
    assert changed(world, "link h h 10 Gbit/s Ethernet").fleet.links[0].kind == "10 Gbit/s Ethernet"
    assert changed(world, "memory h/0 x2").fleet.device("h/0").memory_bytes.value == 16.0


def test_memory_grows_and_so_does_what_is_free(fleet):
    from msgspec.structs import replace

    from tests.unit.planner.small import figure

    device = replace(fleet.devices[0], free_memory_bytes=figure(7.0))
    larger = with_memory(replace(fleet, devices=(device, fleet.devices[1])), "h/0", 2).device("h/0")
    assert (larger.memory_bytes.value, larger.free_memory_bytes.value) == (16.0, 15.0)
    with pytest.raises(UsageError, match="not known"):
        with_memory(fleet_of(["a"]), "h/0", 2)


def test_ends_and_links_that_there_are_not(fleet):
    with pytest.raises(UnknownNameError, match="'x'"):
        with_link(fleet, "h", "x", "1 Gbit/s Ethernet")
    with pytest.raises(UnknownNameError, match="h/0 - h/1"):
        with_faster_link(fleet, "h/0", "h/1", 2)
    with pytest.raises(UnknownNameError):
        with_link(fleet, "h", "h", "string")
