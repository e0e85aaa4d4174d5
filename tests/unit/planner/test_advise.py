"""Advice: a gain that is computed, a sum that adds up, and the word when nothing helps."""

import pytest

from evener.cli.plan import solved
from evener.core.figures import line
from evener.core.job import Job
from evener.errors import NoPlanFitsError
from evener.planner.advise import HELPS, counsel, sum_of
from evener.planner.tries import limited, tries_of
from evener.planner.what_if import World
from evener.report.counsel import counsel_object, counsel_text
from tests.unit.planner.small import fleet_of, linear_profile
from tests.unit.planner.test_whole import chain


def advice(world, job, shapes="auto", **more):
    return counsel(world, job, shapes, tries_of(world, job, shapes, **more), solved)


@pytest.fixture
def slow_link():
    """Two devices whose reduction takes longer than their work."""
    profile = chain({"a": 0.004, "b": 0.004}, param=2**22)
    return World(fleet=fleet_of(["a", "b"], memory=1e10, curve=line(1e-3, 2e8)), profile=profile)


def test_a_slow_link_is_named_with_what_a_faster_one_gives(slow_link):
    job = Job(global_batch=16)
    found = advice(slow_link, job)
    assert found.now is not None and "reduce" in found.now.seconds
    link = next(g for g in found.helps if g.change == "link h h x2")
    faster = World(
        fleet=fleet_of(["a", "b"], memory=1e10, curve=line(0.5e-3, 4e8)), profile=slow_link.profile
    )
    expected = sum_of(faster, solved(faster, job, "auto").plan, job)
    assert link.gain == pytest.approx(found.now.step_s / expected.step_s - 1)
    assert link.gain > 0.05


def test_every_advice_is_played_adds_up_and_says_what_it_assumes(slow_link):
    found = advice(slow_link, Job(global_batch=16, micro_batch=1))
    assert 1 <= len(found.helps) <= 3
    gains = [g.gain for g in found.helps]
    assert gains == sorted(gains, reverse=True) and min(gains) >= HELPS
    for gain in found.helps:
        assert gain.after.played
        assert sum(gain.after.seconds.values()) == pytest.approx(gain.after.step_s)
        assert gain.gain == pytest.approx(gain.after.samples_per_s / found.now.samples_per_s - 1)
    assert all(g.assumed for g in found.helps if g.sort in ("link", "memory", "card"))
    assert all(g.gain is not None for g in found.others)


def test_one_thing_is_told_once(slow_link):
    found = advice(slow_link, Job(global_batch=64))
    assert len([g for g in found.helps if g.sort == "card"]) <= 1


def test_the_word_when_nothing_helps():
    """One sample cannot be shared, and a larger batch takes as much longer."""
    world = World(fleet=fleet_of(["a"], memory=1e10), profile=chain({"a": 0.001}))
    found = advice(world, Job(global_batch=1, allow=("unlinked",)))
    assert found.helps == () and found.others
    assert "nothing would help" in counsel_text(found)
    assert "none gives a hundredth more" in counsel_text(found)


def test_a_setting_of_ones_own_that_costs():
    world = World(fleet=fleet_of(["a", "b"], memory=1e10), profile=chain({"a": 0.001, "b": 0.004}))
    job = Job(global_batch=10, batch_per_device={"h/0": 5, "h/1": 5}, allow=("unlinked",))
    found = advice(world, job)
    best = next(g for g in found.helps if g.change == "no split of your own")
    assert best.gain == pytest.approx(20 / 8 - 1)  # 5 · 4 ms beside 8 · 1 and 2 · 4 ms
    assert best.sort == "setting"


def test_a_job_without_a_plan_is_told_what_would_give_it_one():
    world = World(
        fleet=fleet_of(["a"], memory=100.0), profile=linear_profile({"a": 0.01}, bytes_per_sample=150)
    )
    found = advice(world, Job(global_batch=4, memory_margin=0.0))
    assert found.now is None and found.why_not
    assert found.helps[0].change == "memory h/0 x2" and found.helps[0].gain is None
    assert "the job fits" in counsel_text(found)
    with pytest.raises(NoPlanFitsError):
        counsel(world, Job(global_batch=4), "auto", (), solved)


def test_what_cannot_be_computed_is_told_and_not_advised(slow_link):
    found = advice(slow_link, Job(global_batch=16), consider=["NVIDIA GeForce RTX 3060"])
    assert list(found.failed) == ["add NVIDIA GeForce RTX 3060 h"]
    assert "could not be computed" in counsel_text(found)
    assert "RTX 3060" not in " ".join(g.change for g in (*found.helps, *found.others))


def test_a_schedule_that_does_not_fit_is_told():
    """gpipe keeps all 16 samples of every layer: 4 · 16 · 64 KiB are 4 MiB, the memory of a device."""
    profile = chain({"a": 0.004}, param=2**18, saved=2**16)
    world = World(fleet=fleet_of(["a", "a"], memory=4e6, curve=line(1e-5, 1e9)), profile=profile)
    found = counsel(world, Job(global_batch=16, memory_margin=0.0), "auto", (), solved)
    assert found.failed == {'"schedule": "gpipe" in the plan': "gpipe holds more than fits on h/0"}


def test_without_seconds_by_layer_it_is_the_planners_sum():
    world = World(
        fleet=fleet_of(["a", "a"], memory=1e10, curve=line(1e-3, 1e8)),
        profile=linear_profile({"a": 0.001}, param_bytes=2**22),
    )
    found = advice(world, Job(global_batch=16))
    assert not found.now.played and "nothing was played" in counsel_text(found)
    assert sum(found.now.seconds.values()) == pytest.approx(found.now.step_s)


def test_tries_are_limited_each_sort_in_turn(slow_link):
    tries = tries_of(slow_link, Job(global_batch=16), "auto")
    kept, left = limited(tries, 4)
    assert len(kept) == 4 and left == len(tries) - 4
    assert {t.sort for t in kept} == {"link", "memory", "card", "setting"}


def test_the_object_has_its_keys(slow_link):
    made = counsel_object(advice(slow_link, Job(global_batch=16)))
    assert set(made) == {"now", "why_not", "helps", "others", "failed", "assumed"}
    assert made["helps"][0]["gain"] > 0


def test_what_is_told_first_is_not_beaten_by_what_is_listed_behind_it():
    """Two hosts, one more card in either: both are played, so one of them does help more."""
    world = World(
        fleet=fleet_of(["a", "b", "a"], memory=1e10, curve=line(1e-3, 2e8)),
        profile=chain({"a": 0.004, "b": 0.004}, param=2**22),
    )
    found = advice(world, Job(global_batch=32))
    best = max(g.gain for g in found.helps)
    assert all(g.gain <= best for g in found.others)
    text = counsel_text(found)
    behind = next(line for line in text.splitlines() if line.startswith("in their place, or behind them: "))
    assert "add b h" in behind or "add a h" in behind
    small = next(line for line in text.splitlines() if line.startswith("less than 1 %"))
    assert all(g.gain < HELPS for g in found.others if g.change in small.split(": ", 1)[1])
