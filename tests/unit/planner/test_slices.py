"""Cards in slices and slices as one card: which fit, what they take, and which of the two is faster."""

import pytest

from evener.core.catalogue import with_table
from evener.core.figures import line
from evener.core.fleet import Device, Fleet, Link
from evener.core.job import Job
from evener.errors import UsageError
from evener.planner import plan
from evener.planner.slices import card_of, partitions, slices_of
from evener.planner.what_if import World, changed
from tests.unit.planner.small import linear_profile

A100 = "NVIDIA A100-SXM4-40GB"


def names(kind):
    return ["".join(s.name[0] for s in way) for way in partitions(kind)]


def test_the_slices_of_an_a100():
    assert [(s.name, s.compute, s.memory) for s in slices_of("A100-40")] == [
        ("7g.40gb", 7, 8),
        ("4g.20gb", 4, 4),
        ("3g.20gb", 3, 4),
        ("2g.10gb", 2, 2),
        ("1g.5gb", 1, 1),
    ]
    assert slices_of("A100-40")[2].part == pytest.approx(42 / 108, rel=1e-3)
    assert slices_of("NVIDIA GeForce RTX 3060") == () == partitions("NVIDIA GeForce RTX 3060")


def test_full_partitions():
    """Of the A100 as its maker's guide lists them: 4 + 3 and 3 + 3 are full, 3 + 3 + 1 has no memory part."""
    assert names("A30") == ["22", "211", "1111"]
    found = names(A100)
    assert {"43", "33", "421", "322", "2221", "1111111"} <= set(found)
    assert "331" not in found and "42" not in found
    for way in partitions(A100):
        assert sum(s.compute for s in way) <= 7 and sum(s.memory for s in way) <= 8


def test_a_slice_knows_its_card():
    assert card_of("A100-40 MIG 3g.20gb") == A100
    assert card_of(A100) is None and card_of("something else") is None


@pytest.fixture
def world():
    fleet = Fleet(
        devices=(with_table(Device(name="a/0", kind=A100)),),
        links=(Link(a="a", b="a", curve=line(1e-4, 1e10)),),
    )
    return World(fleet=fleet, profile=linear_profile({A100: 0.001}, param_bytes=2**22))


def seconds(world):
    return plan(world.fleet, world.profile, Job(global_batch=32)).plan.prediction.step_s


def test_slices_take_their_part_of_the_rate(world):
    halves = changed(world, "split a/0 3g.20gb 3g.20gb")
    assert [d.name for d in halves.fleet.devices] == ["a/0-3g.20gb-0", "a/0-3g.20gb-1"]
    one = changed(halves, "drop a/0-3g.20gb-1")
    assert seconds(one) == pytest.approx(seconds(world) * 108 / 42, rel=1e-3)
    assert any("2.57" in said for said in halves.assumed)


def test_whole_beats_slices_where_they_have_to_meet(world):
    """Two halves hold 84 of 108 multiprocessors and sum their gradients on top."""
    assert seconds(changed(world, "split a/0 3g.20gb 3g.20gb")) > seconds(world) * 108 / 84


def test_slices_become_the_card_again(world):
    again = changed(world, "split a/0 4g.20gb 3g.20gb; merge a/0-4g.20gb-0 a/0-3g.20gb-1")
    (card,) = again.fleet.devices
    assert card.kind == A100 and card.memory_bytes.value == 40e9
    assert seconds(again) == pytest.approx(seconds(world))


def test_aliases_of_slices_are_one_card_as_well():
    devices = tuple(with_table(Device(name=f"a/{i}", kind="A100-40 MIG 3g.20gb")) for i in range(2))
    world = World(fleet=Fleet(devices=devices), profile=linear_profile({A100: 0.001}))
    assert [d.kind for d in changed(world, "merge a/0 a/1").fleet.devices] == [A100]


@pytest.mark.parametrize(
    "change",
    [
        "split a/0 4g.20gb 4g.20gb",
        "split a/0 3g.20gb 3g.20gb 1g.5gb",
        "split a/0 5g.1gb",
        "split a/0",
        "merge a/0",
    ],
)
def test_what_does_not_fit_is_refused(world, change):
    with pytest.raises(UsageError):
        changed(world, change)


def test_slices_share_the_links_of_their_card(world):
    from msgspec.structs import replace

    own = Link(a="a", b="a/0", curve=line(1e-5, 1e10))
    fleet = replace(world.fleet, links=(*world.fleet.links, own))
    halves = changed(World(fleet=fleet, profile=world.profile), "split a/0 3g.20gb 3g.20gb").fleet
    shared = [x for x in halves.links if x.b.startswith("a/0-")]
    assert len(shared) == 2 and len({x.bus for x in shared}) == 1 and shared[0].bus
