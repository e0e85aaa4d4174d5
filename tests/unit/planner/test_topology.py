"""Reduction groups: inside a host first, then between; NCCL inside a vendor, Gloo between."""

import pytest

from evener.core.fleet import Device, Fleet
from evener.errors import UnknownNameError
from evener.planner.topology import reduction_groups


def groups(*named, **more):
    fleet = Fleet(devices=tuple(Device(name=n, kind=t, type=t) for n, t in named))
    found = reduction_groups(fleet, [n for n, _ in named], **more)
    return [(r.devices, r.transport) for r in found]


def test_two_cards_on_each_of_two_hosts():
    assert groups(("a/0", "cuda"), ("a/1", "cuda"), ("b/0", "cuda"), ("b/1", "cuda")) == [
        (("a/0", "a/1"), "nccl"),
        (("b/0", "b/1"), "nccl"),
        (("a/0", "b/0"), "nccl"),
    ]


def test_vendors_that_share_a_host_meet_over_gloo():
    assert groups(("a/0", "cuda"), ("a/1", "xpu"), ("a/2", "cuda"), ("a/3", "xpu")) == [
        (("a/0", "a/2"), "nccl"),
        (("a/1", "a/3"), "xccl"),
        (("a/0", "a/1"), "gloo"),
    ]


def test_hosts_of_different_vendors_and_a_cpu():
    assert groups(("a/0", "cuda"), ("a/cpu", "cpu"), ("b/0", "xpu")) == [
        (("a/0", "a/cpu"), "gloo"),
        (("a/0", "b/0"), "gloo"),
    ]


def test_where_nccl_does_not_work_all_is_gloo():
    named = [("a/0", "cuda"), ("a/1", "cuda"), ("b/0", "cuda")]
    assert groups(*named, no_direct={"a"}) == [(("a/0", "a/1"), "gloo"), (("a/0", "b/0"), "gloo")]


def test_one_device_sums_with_nobody_and_strangers_are_named():
    assert groups(("a/0", "cuda")) == []
    with pytest.raises(UnknownNameError):
        reduction_groups(Fleet(devices=(Device(name="a/0", kind="x"),)), ["a/1"])


def test_each_group_says_why():
    devices = tuple(
        Device(name=n, kind=t, type=t) for n, t in [("a/0", "cuda"), ("a/1", "cuda"), ("b/0", "xpu")]
    )
    found = reduction_groups(Fleet(devices=devices), ["a/0", "a/1", "b/0"])
    assert all(r.reason for r in found)
    assert "cuda and xpu share no transport but Gloo" in found[-1].reason
