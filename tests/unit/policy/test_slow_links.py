"""A link at a tenth of its rate is named once, after two steps, with what sums take over it."""

from evener.core.figures import line
from evener.core.fleet import Device, Fleet, Link
from evener.policy.slow_links import LinkWatch

NAMES = ("a/0", "a/1", "b/0", "b/1")


def watch() -> LinkWatch:
    ways = {("a", "a"): 4e9, ("b", "b"): 4e9, ("a", "b"): 12.5e6}
    fleet = Fleet(
        devices=tuple(Device(name=n, kind="k") for n in NAMES),
        links=tuple(Link(a=a, b=b, curve=line(1e-5, rate)) for (a, b), rate in ways.items()),
    )
    return LinkWatch(fleet=fleet, devices=NAMES, buffers=[20e6])


def test_two_slow_steps_name_the_link_once() -> None:
    seen = watch()
    assert seen.after_step("a/0", {"b/0": 1.25e6}) == []
    (told,) = seen.after_step("a/0", {"b/0": 1.25e6})
    assert "between a and b carries 1.25 MB/s, 1/10 of the 12.5 MB/s" in told
    assert "take 13.5 s there instead of 1.35" in told
    assert seen.after_step("a/0", {"b/0": 1.25e6}) == []


def test_one_slow_step_and_a_link_shared_for_a_while_are_not_told() -> None:
    seen = watch()
    for rate in (1e6, 12e6, 1e6, 12e6, 5e6, 5e6, 5e6):
        assert seen.after_step("a/0", {"b/0": rate}) == []
    assert seen.after_step("a/0", {"a/1": 1e3, "b/1": 12e6}) == []
