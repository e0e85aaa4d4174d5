"""A step of which some samples are kept is finished so that every sample counts once."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.core.membership import Standing
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.ranges import count, cut, dealt, gaps, joined
from evener.core.split import apportion
from evener.policy.rest import rest_of, worth_copying

NAMES = ("lab/a", "lab/b", "lab/c", "lab/d")


def plan_of(samples: dict[str, int], micro_batch: int = 4) -> Plan:
    stages = {
        d: (Stage(layers=("all",), shares=(Share(devices=(d,), samples=micro_batch),)),) for d in samples
    }
    pipelines = tuple(
        Pipeline(samples=n, micro_batch=micro_batch, stages=stages[d]) for d, n in samples.items()
    )
    return Plan(global_batch=sum(samples.values()), pipelines=pipelines)


def standing(device: str, *kept: tuple[int, int], step: int = 14, none: str = "") -> Standing:
    return Standing(device=device, step=step, samples_seen=0, kept=kept, kept_none=none)


def numbers(ranges) -> list[int]:
    return [n for first, stop in ranges for n in range(first, stop)]


@st.composite
def interrupted(draw):
    """Standings after a loss, the samples of the step, the plan before and the plan after."""
    devices = NAMES[: draw(st.integers(2, 4))]
    parts = draw(st.lists(st.integers(1, 20), min_size=len(devices), max_size=len(devices)))
    before = plan_of(dict(zip(devices, parts, strict=True)))
    samples = draw(st.integers(1, before.global_batch))
    # What each sample's taker has of it, in any pattern: tickets leave holes.
    takers = draw(st.lists(st.sampled_from((*devices, None)), min_size=samples, max_size=samples))
    there = draw(st.lists(st.sampled_from(devices), min_size=1, unique=True))
    standings = [
        standing(d, *joined((n, n + 1) for n, taker in enumerate(takers) if taker == d), none="torn")
        for d in there
    ]
    used = draw(st.lists(st.sampled_from(there), min_size=1, unique=True))
    weights = draw(st.lists(st.integers(1, 20), min_size=len(used), max_size=len(used)))
    shares = apportion(before.global_batch, weights)
    after = plan_of(dict(zip(used, shares, strict=True)), micro_batch=draw(st.integers(1, 8)))
    return standings, samples, before, after


@given(interrupted())
def test_every_sample_is_kept_or_taken_anew_once(case) -> None:
    standings, samples, before, after = case
    rest, told = rest_of(standings, 14, samples, before, after)
    if rest is None:
        assert not any(s.kept for s in standings if s.device in after.devices)
        assert told.startswith("step 14 is taken anew whole: ")
        return
    everything = [r for by_device in (rest.kept, rest.anew) for ranges in by_device.values() for r in ranges]
    assert Counter(numbers(everything)) == Counter(range(samples))
    assert set(rest.kept) | set(rest.anew) <= set(after.devices)
    for s in standings:
        assert rest.kept.get(s.device, s.kept) == s.kept  # nothing that a device has is dropped in part
    missing = samples - sum(map(count, rest.kept.values()))
    for p in after.pipelines:
        assert abs(count(rest.anew[p.devices[0]]) - missing * p.samples / after.global_batch) < 1
        assert all(stop - first <= p.micro_batch for first, stop in rest.anew[p.devices[0]])


@given(interrupted(), st.data())
def test_what_a_second_device_kept_is_lost_with_it(case, data) -> None:
    standings, samples, before, after = case
    rest, _ = rest_of(standings, 14, samples, before, after)
    if rest is None or len(after.devices) == 1:
        return
    second = data.draw(st.sampled_from(after.devices))
    left = {p.devices[0]: p.samples for p in after.pipelines if p.devices[0] != second}
    last = plan_of(dict(zip(left, apportion(after.global_batch, list(left.values())), strict=True)))
    again = [standing(d, *joined([*rest.kept.get(d, ()), *rest.anew[d]]), none="nothing of it") for d in left]
    found, _ = rest_of(again, 14, samples, after, last)
    gone = Counter(numbers([*rest.kept.get(second, ()), *rest.anew[second]]))
    if found is not None:
        assert Counter(numbers(r for ranges in found.anew.values() for r in ranges)) == gone


@given(st.lists(st.integers(0, 1), max_size=30), st.lists(st.integers(0, 9), min_size=1), st.integers(1, 7))
def test_ranges_lose_and_double_nothing(taken, weights, limit) -> None:
    ranges = joined((n, n + 1) for n, is_in in enumerate(taken) if is_in)
    left = gaps(ranges, len(taken))
    assert sorted(numbers(ranges) + numbers(left)) == list(range(len(taken)))
    if sum(weights):
        parts = dealt(left, apportion(count(left), weights))
        assert [n for part in parts for n in numbers(part)] == numbers(left)
    assert numbers(cut(left, limit)) == numbers(left)


def test_the_sentence_says_how_many_and_who() -> None:
    before = plan_of({"lab/a": 12, "lab/b": 9, "lab/c": 11})
    after = plan_of({"lab/a": 18, "lab/b": 14})
    rest, told = rest_of([standing("lab/a", (0, 12)), standing("lab/b", (12, 21))], 14, 32, before, after)
    assert told == (
        "21 of 32 samples of step 14 are kept (lab/a 12, lab/b 9), the other 11 taken anew (lab/a 6, lab/b 5)"
    )
    assert rest is not None and rest.anew == {"lab/a": ((21, 25), (25, 27)), "lab/b": ((27, 31), (31, 32))}
    _, told = rest_of([standing("lab/a", (0, 12)), standing("lab/b", none="why")], 14, 32, before, after)
    assert told.startswith("12 of 32") and told.endswith("; lab/b kept none: why")


@pytest.mark.parametrize(
    ("standings", "after", "why"),
    [
        (
            [standing("lab/a", none="it is cut"), standing("lab/b", none="it is cut")],
            None,
            "whole: it is cut",
        ),
        ([standing("lab/a", (0, 4)), standing("lab/b", (3, 8))], None, "sample 3 is in two ranges"),
        ([standing("lab/a", (0, 4))], {"lab/b": 8}, "lab/a has no part in the new plan"),
        ([standing("lab/a", (0, 9)), standing("lab/b")], None, "samples 0 to 9 were kept of 8"),
        ([standing("lab/a", (0, 4))], {"lab/a": 9}, "the global batch was 8 samples and is 9"),
    ],
)
def test_where_nothing_may_be_kept_the_step_is_taken_whole_and_it_says_why(standings, after, why) -> None:
    before = plan_of({"lab/a": 4, "lab/b": 4})
    rest, told = rest_of(standings, 14, 8, before, plan_of(after) if after else before)
    assert rest is None and told.startswith("step 14 is taken anew whole") and why in told


def test_a_plan_that_cuts_the_model_takes_no_gradients_of_the_whole() -> None:
    before = plan_of({"lab/a": 4, "lab/b": 4})
    stages = tuple(
        Stage(layers=(n,), shares=(Share(devices=(d,), samples=4),))
        for n, d in (("x", "lab/a"), ("y", "lab/b"))
    )
    after = Plan(global_batch=8, pipelines=(Pipeline(samples=8, micro_batch=4, stages=stages),))
    rest, told = rest_of([standing("lab/a", (0, 4))], 14, 8, before, after)
    assert rest is None and "the new plan cuts the model" in told


def test_a_step_that_nobody_had_begun_is_taken_without_a_word() -> None:
    plan = plan_of({"lab/a": 4, "lab/b": 4})
    assert rest_of([standing("lab/a"), standing("lab/b", (0, 8), step=13)], 14, 8, plan, plan) == (None, "")


@given(st.floats(0, 10), st.floats(1e-3, 1e3))
def test_a_copy_is_worth_what_a_loss_an_hour_would_cost(copy_s: float, step_s: float) -> None:
    is_worth, told = worth_copying(copy_s, step_s)
    spent_s = copy_s * 3600 / step_s  # in an hour
    assert is_worth == (copy_s <= step_s / 1000 or spent_s <= step_s * (1 + 1e-12))
    assert ("no more than" in told) != is_worth


def test_a_copy_of_8_ms_pays_for_steps_of_10_s_and_not_of_1_s() -> None:
    assert worth_copying(0.008, 10.0)[0]
    assert worth_copying(0.008, 1.0) == (
        False,
        "a copy of its gradients takes 8 ms of a step of 1 s; "
        "no more than 1 ms would be worth it, at a loss an hour",
    )
