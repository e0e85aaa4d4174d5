"""Fewer exchanges are proposed only where they are allowed and predicted to pay; the plan says why."""

from dataclasses import replace as replaced

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from evener.core.exchange import Exchange, Lane
from evener.core.fewer import Fewer, fewer_in
from evener.core.figures import line
from evener.core.fleet import Device, Fleet, Link, TriedSum
from evener.core.job import Job
from evener.core.order import resized
from evener.cost.fewer import apart_seconds, bytes_between, with_links_times
from evener.errors import UsageError
from evener.planner import plan
from evener.planner.what_if import World, changed
from tests.unit.planner.small import linear_profile

MIB = 2**20


def two_hosts(between: float, members: tuple[int, ...] = (2, 2)) -> Fleet:
    """Hosts of so many processes, joined at `between` bytes/s; 5 GB/s inside."""
    devices = tuple(
        Device(name=f"h{i}/{m}", kind="k") for i, number in enumerate(members) for m in range(number)
    )
    inside = tuple(Link(a=f"h{i}", b=f"h{i}", curve=line(1e-5, 5e9)) for i in range(len(members)))
    pairs = [(i, j) for i in range(len(members)) for j in range(i)]
    return Fleet(
        devices=devices,
        links=inside + tuple(Link(a=f"h{i}", b=f"h{j}", curve=line(1e-4, between)) for i, j in pairs),
    )


SLOW = two_hosts(12.5e6)  # 100 Mbit/s
PROFILE = linear_profile({"k": 0.01}, param_bytes=20 * MIB)


def job(*words: str, batch: int = 32) -> Job:
    return Job(global_batch=batch, fewer=fewer_in(words))


def test_a_slow_link_makes_hosts_meet_seldom() -> None:
    """32 samples of 10 ms: one host 0.16 s; both 0.08 s and 1.4 s of exchange, every 64 steps or so 0.026."""
    sync = plan(SLOW, PROFILE, job())
    assert {d.partition("/")[0] for d in sync.plan.devices} == {"h0"}
    found = plan(SLOW, PROFILE, job("local:64"))
    told = found.plan.fewer
    assert told is not None and (told.how, told.every) == ("local", 64)
    assert set(found.plan.devices) == {"h0/0", "h0/1", "h1/0", "h1/1"}
    assert 0.08 < found.plan.prediction.step_s < 0.12 < sync.plan.prediction.step_s
    assert any("hosts train by themselves for 64 steps" in s for s in found.plan.inexact)
    assert "saves" in told.why and "MB between hosts" in told.why
    assert "one exchange a step" in [a.name for a in found.alternatives]
    for causes in found.plan.prediction.seconds.values():
        assert sum(causes.values()) == pytest.approx(found.plan.prediction.step_s)


def test_nothing_is_done_that_was_not_allowed() -> None:
    assert plan(SLOW, PROFILE, job()).plan.fewer is None
    found = plan(SLOW, PROFILE, job("accumulate"))
    assert found.plan.fewer is None or found.plan.fewer.how == "accumulate"


def test_a_fast_link_leaves_one_exchange_a_step_and_says_so() -> None:
    fast = two_hosts(5e9)
    found = plan(fast, PROFILE, job("delayed", "local:16"))
    assert found.plan.fewer is None and not found.plan.inexact
    (said,) = [r for r in found.reasons if r.startswith("--fewer delayed,local:16:1:0 is not used: ")]
    assert said in found.plan.why and "one exchange a step takes " in said
    assert said.count("MB between hosts") == 2


def test_delayed_hides_what_the_next_step_takes() -> None:
    """12 s of computing for 1.4 s of exchange: it costs nothing."""
    slow = linear_profile({"k": 1.5}, param_bytes=20 * MIB)
    found = plan(SLOW, slow, job("delayed"))
    assert found.plan.fewer is not None and found.plan.fewer.how == "delayed"
    assert found.plan.prediction.step_s == pytest.approx(12, rel=0.01)


def test_accumulating_is_the_plan_of_a_larger_batch() -> None:
    """Its step is of so many global batches; the last smaller one of an epoch keeps its proportions."""
    found = plan(SLOW, PROFILE, job("accumulate:32")).plan
    assert found.fewer is not None and found.global_batch == 32 * 32
    assert sum(p.samples for p in resized(found, 64).pipelines) == 64
    assert any("one step for every 32 global batches, as 1024 samples" in s for s in found.inexact)


def test_a_number_is_found_where_none_is_named() -> None:
    """The least that leaves exchanges a tenth of the time: 1.4 s in 16 steps of 0.64 s are 12 %, in 32 7."""
    slow = linear_profile({"k": 0.08}, param_bytes=20 * MIB)
    found = plan(SLOW, slow, job("local")).plan
    assert found.fewer is not None and found.fewer.every == 32


def test_one_host_has_nothing_to_exchange_less() -> None:
    found = plan(two_hosts(1e9, (2,)), PROFILE, job("local:8"))
    assert found.plan.fewer is None and any(
        "--fewer local:8:1:0 is not used: " in r and "one host" in r for r in found.reasons
    )


@pytest.mark.parametrize(
    "word", ["locals", "delayed:2", "local:0", "local:x", "accumulate:2:3", "local:4:99", ""]
)
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(UsageError):
        fewer_in((word,))


def test_a_way_named_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        fewer_in(("local:4", "local:8"))


def test_words_read_what_they_print() -> None:
    for word in ("accumulate:4", "delayed", "local:16:0.7:0.9", "local:8:1:0"):
        assert [str(f) for f in fewer_in((word,))] == [word]


@settings(max_examples=30, deadline=None)
@given(
    between=st.floats(1e6, 5e9),
    sample_s=st.floats(1e-3, 1.0),
    every=st.integers(1, 200),
    members=st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 1, 1)]),
)
def test_what_is_chosen_is_never_predicted_slower(
    between: float, sample_s: float, every: int, members
) -> None:
    fleet, profile = two_hosts(between, members), linear_profile({"k": sample_s}, param_bytes=20 * MIB)
    sync = plan(fleet, profile, job()).plan
    found = plan(fleet, profile, job("delayed", f"local:{every}", "accumulate:2")).plan
    times = found.global_batch / 32
    assert found.prediction.step_s / times <= sync.prediction.step_s * (1 + 1e-9)
    assert (found.fewer is None) == (found.inexact == ())
    if found.fewer and found.fewer.parts_hosts:
        assert found.reductions[-1].part is not None


def test_seconds_of_hosts_by_themselves() -> None:
    assert apart_seconds(Fewer(how="delayed"), 1.0, 8.0) == 8.0
    assert apart_seconds(Fewer(how="local", every=16), 1.0, 8.0) == 1.5


def test_links_inside_hosts_keep_their_seconds() -> None:
    faster = with_links_times(SLOW, 0.1)
    assert faster.link("h0/0", "h0/1") == SLOW.link("h0/0", "h0/1")
    assert faster.link("h0/0", "h1/1").curve.seconds(1e6) == pytest.approx(
        SLOW.link("h0/0", "h1/1").curve.seconds(1e6) / 10
    )
    assert replace(faster, links=()) == replace(SLOW, links=())


def test_sums_that_were_tried_say_nothing_of_faster_links() -> None:
    """The search with links 16 times as fast went on with what had been tried on the links as they are."""
    fleet = two_hosts(1e6)
    names = tuple(d.name for d in fleet.devices)
    tried = replace(fleet, sums=(TriedSum(devices=names, way="ring", curve=line(1.0, 1e6)),))
    assert with_links_times(tried, 1 / 16).sums == ()
    world = World(fleet=tried, profile=linear_profile({"k": 1.0}))
    for change in ("links x2", "link h0 h1 x2", "link h0 h1 1 Gbit/s Ethernet"):
        assert changed(world, change).fleet.sums == ()
    assert changed(world, "slow h0/0 x2").fleet.sums == tried.sums


def test_columns_count_by_the_slices_that_are_packed() -> None:
    """PowerSGD has no ratio of bytes: 20 MB over two hosts were told as 40, as if nothing were compressed."""
    lane = Lane(devices=("a/0", "b/0"), part=1.0, adds=(1.0, 1.0), compression="powersgd4")
    exchange = Exchange(groups=(("a/0",), ("b/0",)), lanes=(lane,))
    # ten pieces of 2 MB, a slice of 1 MB each way and back: 4 columns and 4 rows of 500 values of 4 bytes
    assert bytes_between(20e6, exchange) == pytest.approx(10 * 2 * 2 * 2 * 4 * 500 * 4)
    assert bytes_between(20e6, replaced(exchange, lanes=(replaced(lane, compression="int8"),))) == (
        pytest.approx(0.254 * 40e6)
    )
