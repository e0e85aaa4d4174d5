"""The ring formula, and which hops share a bus."""

import pytest

from evener.core.collectives import all_reduce_seconds, ring
from evener.core.figures import line
from evener.core.fleet import Device, Fleet, Link


def devices(*names: str) -> tuple[Device, ...]:
    return tuple(Device(name=name, kind="k") for name in names)


def test_worked_number() -> None:
    assert all_reduce_seconds(8e6, [line(1e-3, 1e9)] * 4) == pytest.approx(18e-3)


def test_the_slowest_hop_decides() -> None:
    hops = [line(1e-3, 1e9), None, line(2e-3, 1e8)]
    assert all_reduce_seconds(3e6, hops) == pytest.approx(4 * (2e-3 + 1e6 / 1e8))


def test_one_member_or_no_links_cost_nothing() -> None:
    assert all_reduce_seconds(1e9, [line(1.0, 1.0)]) == 0
    assert all_reduce_seconds(1e9, []) == 0
    assert all_reduce_seconds(1e9, [None, None]) == 0


def test_two_members_use_their_link_both_ways() -> None:
    curve = line(1e-3, 1e9)
    fleet = Fleet(devices=devices("a/x", "b/x"), links=(Link(a="a", b="b", curve=curve),))
    assert ring(fleet, ("a/x", "b/x")) == (curve, curve)
    assert all_reduce_seconds(2e6, ring(fleet, ("a/x", "b/x"))) == pytest.approx(2 * 2e-3)


def test_hosts_are_kept_together() -> None:
    slow, fast = line(1e-2, 1e8), line(1e-4, 1e10)
    fleet = Fleet(
        devices=devices("a/x", "b/x", "a/y", "b/y"),
        links=(
            Link(a="a", b="b", curve=slow),
            Link(a="a", b="a", curve=fast),
            Link(a="b", b="b", curve=fast),
        ),
    )
    assert ring(fleet, ("a/x", "b/x", "a/y", "b/y")) == (fast, slow, fast, slow)


def test_hops_in_one_direction_share_a_bus() -> None:
    curve = line(1e-3, 4e9)
    fleet = Fleet(
        devices=devices("a/w", "a/x", "a/y", "a/z"), links=(Link(a="a", b="a", curve=curve, bus="pcie"),)
    )
    hops = ring(fleet, ("a/w", "a/x", "a/y", "a/z"))
    assert all_reduce_seconds(4e6, hops) == pytest.approx(6 * (1e-3 + 1e6 / 1e9))


def test_opposite_directions_between_hosts_do_not_share() -> None:
    curve = line(1e-3, 1e9)
    fleet = Fleet(devices=devices("a/x", "b/x"), links=(Link(a="a", b="b", curve=curve, bus="cable"),))
    assert all_reduce_seconds(2e6, ring(fleet, ("a/x", "b/x"))) == pytest.approx(4e-3)


def test_missing_links_keep_their_place() -> None:
    assert ring(Fleet(devices=devices("a/x", "b/x")), ("a/x", "b/x")) == (None, None)
    assert ring(Fleet(devices=devices("a/x")), ("a/x",)) == (None,)


def test_a_link_measured_in_reductions_is_priced_by_them() -> None:
    plain, summing = line(1e-4, 1e10), line(1e-3, 1e9)
    link = Link(a="a", b="a", curve=plain, reduce_curve=summing)
    fleet = Fleet(devices=devices("a/x", "a/y"), links=(link,))
    assert ring(fleet, ("a/x", "a/y")) == (summing, summing)
