"""A plan over devices that have no link between them is refused, with the pair and what would work."""

import pytest

from evener.core.figures import line
from evener.core.fleet import Device, Fleet, Link
from evener.core.job import Job
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.errors import UnknownNameError
from evener.planner import plan
from evener.planner.links import check_links
from tests.unit.planner.small import fleet_of, linear_profile

CURVE = line(1e-3, 1e9)
ETHERNET = Link(a="a", b="b", curve=CURVE)


def hosts(*links: Link) -> Fleet:
    return Fleet(devices=tuple(Device(name=n, kind="k") for n in ("a/0", "a/1", "b/0")), links=links)


def pipeline(*names: str) -> Pipeline:
    stages = tuple(
        Stage(layers=(f"l{i}",), shares=(Share(devices=(n,), samples=1),)) for i, n in enumerate(names)
    )
    return Pipeline(samples=2, micro_batch=1, stages=stages)


def test_two_devices_without_a_link_are_refused_by_name():
    profile = linear_profile({"fast": 0.004, "slow": 0.012})
    with pytest.raises(UnknownNameError, match="h/0 and h/1") as caught:
        plan(fleet_of(["fast", "slow"]), profile, Job(global_batch=16))
    assert '"a": "h", "b": "h"' in caught.value.remedy and caught.value.code == "EV102"


def test_it_is_fine_with_leave_with_one_device_and_with_a_link():
    profile = linear_profile({"fast": 0.004, "slow": 0.012, "useless": 1.0})
    allowed = plan(fleet_of(["fast", "slow"]), profile, Job(global_batch=16, allow=("unlinked",)))
    assert any("costs nothing" in reason for reason in allowed.reasons)
    assert len(plan(fleet_of(["fast", "useless"]), profile, Job(global_batch=16)).plan.devices) == 1
    assert len(plan(fleet_of(["fast", "slow"], curve=CURVE), profile, Job(global_batch=16)).plan.devices) == 2


def test_neighbours_need_a_link_and_those_apart_do_not():
    one = Plan(global_batch=2, pipelines=(pipeline("a/0", "b/0", "a/1"),))
    check_links(hosts(ETHERNET), one)
    with pytest.raises(UnknownNameError, match="a/0 and b/0"):
        check_links(hosts(Link(a="a", b="a", curve=CURVE)), one)
    with pytest.raises(UnknownNameError, match="a/0 and a/1"):
        check_links(hosts(ETHERNET), Plan(global_batch=2, pipelines=(pipeline("a/0", "a/1"),)))


def test_holders_of_a_layer_need_links_and_groups_their_own():
    two = Plan(global_batch=4, pipelines=(pipeline("a/0"), pipeline("b/0")))
    check_links(hosts(ETHERNET), two)
    with pytest.raises(UnknownNameError, match="a/0 and b/0"):
        check_links(hosts(), two)
    team = Stage(layers=("l0",), shares=(Share(devices=("a/0", "a/1"), samples=1),))
    with pytest.raises(UnknownNameError, match="a/0 and a/1"):
        check_links(
            hosts(), Plan(global_batch=1, pipelines=(Pipeline(samples=1, micro_batch=1, stages=(team,)),))
        )
