"""Which way is chosen for gradients, and what is said about it."""

import pytest

from evener.core.exchange import LOSSLESS
from evener.core.figures import Curve, line
from evener.core.fleet import Device, Fleet, Link
from evener.cost.exchange import choose_way, compressed_parts

NAMES = ("a/0", "a/1", "b/0", "b/1")
BUFFERS = [8e6, 8e6, 4e6]
FAST, SLOW = line(1e-5, 4e9), line(1e-4, 12.5e6)


def fleet_of(between: Curve, names=NAMES, *links: Link) -> Fleet:
    hosts = list(dict.fromkeys(n.partition("/")[0] for n in names))
    pairs = [(a, b) for i, a in enumerate(hosts) for b in hosts[i:]]
    own = tuple(Link(a=a, b=b, curve=FAST if a == b else between) for a, b in pairs)
    return Fleet(devices=tuple(Device(name=n, kind="k") for n in names), links=(*links, *own))


def test_a_slow_link_is_crossed_once() -> None:
    found = choose_way(fleet_of(SLOW), NAMES, BUFFERS)
    assert "lane" in found.way.name
    assert found.seconds["ring"] == pytest.approx(2.4, rel=0.01)
    assert found.seconds["1 lane"] == pytest.approx(1.6, rel=0.02)
    assert "ring 2.4 s" in found.reductions[-1].reason


def test_packing_without_loss_needs_no_leave_and_is_no_loss() -> None:
    slow = choose_way(fleet_of(SLOW), NAMES, BUFFERS)
    assert slow.way.compression == LOSSLESS and slow.seconds[slow.way.name] == pytest.approx(1.4, rel=0.03)
    assert compressed_parts(slow.reductions) == ()
    fast = choose_way(fleet_of(line(1e-5, 2e9)), NAMES, BUFFERS)
    assert fast.way.compression is None


def test_one_host_has_one_ring() -> None:
    found = choose_way(fleet_of(SLOW, NAMES[:2]), NAMES[:2], BUFFERS)
    assert found.way.name == "ring" and found.reductions[0].devices == NAMES[:2]


def test_compression_only_where_allowed_and_worth_it() -> None:
    assert choose_way(fleet_of(SLOW), NAMES, BUFFERS, compress=("int8",)).way.compression == "int8"
    fast = line(1e-5, 50e9)
    assert choose_way(fleet_of(fast), NAMES, BUFFERS, compress=("int8",)).way.compression is None


def test_ranks_in_turn_cross_the_link_twice_as_often() -> None:
    names = ("a/0", "b/0", "a/1", "b/1")
    found = choose_way(fleet_of(SLOW, names), names, BUFFERS)
    assert found.seconds["ring"] == pytest.approx(4.8, rel=0.01) and "lane" in found.way.name


def test_the_user_may_say_which() -> None:
    assert choose_way(fleet_of(SLOW), NAMES, BUFFERS, sums="ring").way.name == "ring"
    grouped = choose_way(fleet_of(line(1e-5, 400e9)), NAMES, BUFFERS, sums="grouped")
    assert grouped.way.name != "ring" and "as asked for" in grouped.why


def test_two_paths_carry_parts_by_their_rate() -> None:
    paths = (Link(a="a/0", b="b/0", curve=line(1e-5, 25e6)), Link(a="a/1", b="b/1", curve=line(1e-5, 12.5e6)))
    found = choose_way(fleet_of(SLOW, NAMES, *paths), NAMES, BUFFERS)
    parts = {r.devices: r.part for r in found.reductions if r.part}
    assert parts[("a/0", "b/0")] == pytest.approx(2 / 3, rel=0.01)
    assert found.seconds["2 lanes"] == pytest.approx(20 / 37.5, rel=0.05)


def test_a_host_with_a_slow_link_adds_up_nothing() -> None:
    names = ("a/0", "b/0", "c/0")
    hosts = [Link(a="a", b="b", curve=line(1e-5, 125e6))]
    found = choose_way(fleet_of(SLOW, names, *hosts), names, [20e6])
    (lane,) = (r for r in found.reductions if r.part)
    assert lane.adds == {"a/0": 0.5, "b/0": 0.5, "c/0": 0.0}


def test_a_lossy_plan_says_so() -> None:
    found = choose_way(fleet_of(SLOW), NAMES, BUFFERS, compress=("int8",))
    (said,) = compressed_parts(found.reductions)
    assert said.startswith("gradients go between hosts as int8")
