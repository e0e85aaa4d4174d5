"""How gradients are summed is part of the plan: chosen with the devices, said, and overridable."""

import pytest

from evener.core.figures import line
from evener.core.fleet import Device, Fleet, Link
from evener.core.job import Job
from evener.core.plan import Plan
from evener.planner import plan
from tests.unit.planner.small import linear_profile

NAMES = ("a/0", "a/1", "b/0", "b/1")
PROFILE = linear_profile({"k": 0.05}, param_bytes=8 * 2**20)


def fleet(bytes_per_s: float) -> Fleet:
    ways = {("a", "a"): 4e9, ("b", "b"): 4e9, ("a", "b"): bytes_per_s}
    return Fleet(
        devices=tuple(Device(name=n, kind="k") for n in NAMES),
        links=tuple(Link(a=a, b=b, curve=line(1e-4, rate)) for (a, b), rate in ways.items()),
    )


def planned(bytes_per_s: float, **wishes) -> Plan:
    return plan(fleet(bytes_per_s), PROFILE, Job(global_batch=64, **wishes)).plan


def test_groups_by_host_over_a_slow_link_and_their_seconds_in_the_step() -> None:
    found = planned(12.5e6)
    (said,) = (r.reason for r in found.reductions if r.part == 1.0)
    assert "groups by host" in said and "ring" in said
    assert found.prediction is not None and found.prediction.step_s < 0.8 + 1.5 * 8 * 2**20 / 12.5e6
    assert found.inexact == ()


def test_one_host_alone_is_taken_where_the_link_costs_more_than_it_brings() -> None:
    found = planned(1e6)
    assert set(found.samples_by_device()) in ({"a/0", "a/1"}, {"b/0", "b/1"})
    assert all("with it a step takes" in x.reason for x in found.left_out) and len(found.left_out) == 2


def test_compression_has_to_be_allowed_and_is_named() -> None:
    found = planned(12.5e6, compress=("int8",))
    assert any("int8" in sentence for sentence in found.inexact)
    assert found.prediction.step_s < planned(12.5e6).prediction.step_s


@pytest.mark.parametrize(("sums", "lanes"), [("ring", False), ("grouped", True)])
def test_the_user_may_say_how(sums: str, lanes: bool) -> None:
    assert any(r.part is not None for r in planned(12.5e6, sums=sums).reductions) is lanes


@pytest.mark.parametrize(("rate", "words"), [(1e6, "the plan's devices are all on "), (4e9, "ring")])
def test_compression_that_is_not_used_is_told_with_the_reason(rate: float, words: str) -> None:
    found = plan(fleet(rate), PROFILE, Job(global_batch=64, compress=("bf16",)))
    (said,) = [r for r in found.reasons if r.startswith("--compress bf16 is not used: ")]
    assert words in said and said in found.plan.why
