"""The data-parallel planner against hand-computed cases: K14, memory, given splits, devices left out."""

import pytest

from evener.core.figures import line
from evener.core.fleet import Device, Fleet, Link
from evener.core.job import Job
from evener.errors import NoPlanFitsError, UnknownNameError, UsageError
from evener.planner import plan
from tests.unit.planner.small import figure, fleet_of, linear_profile

FREE = ("unlinked",)


def test_k14_shares_end_together():
    """4 and 12 ms a sample, 16 samples: 12 and 4, where the even split takes twice as long."""
    profile = linear_profile({"fast": 0.004, "slow": 0.012})
    result = plan(fleet_of(["fast", "slow"]), profile, Job(global_batch=16, allow=FREE))
    assert result.plan.samples_by_device() == {"h/0": 12, "h/1": 4}
    assert result.plan.prediction.step_s == pytest.approx(0.048)
    assert (result.status, result.gap) == ("proven", 0.0)
    even = next(a for a in result.alternatives if a.name == "even data parallel")
    assert even.step_s == pytest.approx(0.096)


def test_k14_a_device_that_slows_the_job_is_left_out_with_the_reason():
    profile = linear_profile({"fast": 0.004, "useless": 1.0})
    result = plan(fleet_of(["fast", "useless"]), profile, Job(global_batch=16))
    assert result.plan.samples_by_device() == {"h/0": 16}
    (out,) = result.plan.left_out
    assert out.device == "h/1"
    assert "with it a step takes 1 s, without it 64 ms" in out.reason


def test_a_slow_link_makes_one_device_the_best():
    profile = linear_profile({"fast": 0.004, "slow": 0.012}, param_bytes=8 * 2**20)
    result = plan(fleet_of(["fast", "slow"], curve=line(1.0, 1e9)), profile, Job(global_batch=16))
    assert result.plan.samples_by_device() == {"h/0": 16}
    assert result.status == "proven"


def test_of_too_many_sets_to_try_those_of_a_host_are_looked_at():
    """14 odd devices on 7 hosts with slow links between: the two of the last host are best."""
    seconds = {f"k{i}": 0.004 + 0.0005 * ((5 * i) % 14) for i in range(14)}
    names = [f"h{i // 2}/{i % 2}" for i in range(14)]
    devices = tuple(Device(name=n, kind=k) for n, k in zip(names, seconds, strict=True))
    hosts = [f"h{i}" for i in range(7)]
    inside = tuple(Link(a=h, b=h, curve=line(1e-5, 1e10 if h == "h6" else 1e7)) for h in hosts)
    between = tuple(
        Link(a=a, b=b, curve=line(1e-3, 1e7)) for i, a in enumerate(hosts) for b in hosts[i + 1 :]
    )
    profile = linear_profile(seconds, param_bytes=64 * 2**20)
    result = plan(Fleet(devices=devices, links=(*inside, *between)), profile, Job(global_batch=64))
    assert set(result.plan.devices) == {"h6/0", "h6/1"}


def test_many_hosts_leave_tries_for_the_search():
    """160 hosts, each a start of its own, took all that may be tried: nothing was searched."""
    seconds = {f"k{i}": 0.004 * (1 + i / 20) for i in range(160)}
    devices = tuple(Device(name=f"h{i}/0", kind=k) for i, k in enumerate(seconds))
    links = tuple(
        Link(a=f"h{i}", b=f"h{j}", curve=line(1e-3, 1e9)) for i in range(160) for j in range(i + 1, 160)
    )
    profile = linear_profile(seconds, param_bytes=2**20)
    result = plan(Fleet(devices=devices, links=links), profile, Job(global_batch=512, sums="ring"))
    assert len(result.plan.devices) % 20  # 33, in 172 ms a step; 40 take 175


def test_the_reduction_is_priced_as_a_ring_behind_the_last_backward():
    """One bucket that is ready only at the end: 2 rounds of (1 ms + 4 MiB / 1 GB/s)."""
    profile = linear_profile({"k": 0.01}, param_bytes=8 * 2**20)
    result = plan(fleet_of(["k", "k"], curve=line(1e-3, 1e9)), profile, Job(global_batch=16))
    reduce_s = 2 * (1e-3 + 4 * 2**20 / 1e9)
    assert result.plan.prediction.step_s == pytest.approx(0.08 + reduce_s)
    assert result.plan.prediction.seconds["h/0"]["reduce"] == pytest.approx(reduce_s)


def test_causes_add_up_to_the_step_on_every_device():
    profile = linear_profile({"fast": 0.004, "slow": 0.012}, fixed_s=0.003, update_s=0.002, param_bytes=2**20)
    result = plan(fleet_of(["fast", "slow"], curve=line(1e-4, 1e9)), profile, Job(global_batch=17))
    prediction = result.plan.prediction
    for causes in prediction.seconds.values():
        assert sum(causes.values()) == pytest.approx(prediction.step_s)


def test_memory_sets_the_micro_batch():
    """100 bytes a sample, 1,000 bytes of memory, a tenth left free: nine at once."""
    profile = linear_profile({"k": 0.01}, bytes_per_sample=100, fixed_s=0.1)
    result = plan(fleet_of(["k"], memory=1000), profile, Job(global_batch=20))
    (pipeline,) = result.plan.pipelines
    assert pipeline.micro_batch <= 9
    assert len(pipeline.micro_batch_sizes) == 3
    assert result.plan.prediction.memory_bytes["h/0"] <= 900


def test_a_size_measured_as_not_fitting_is_not_used():
    profile = linear_profile({"k": 0.01}, sizes=(1, 8, 64), fixed_s=0.1)
    steps = list(profile.steps)
    steps[2] = type(steps[2])(kind="k", micro_batch=64, fits=False)
    profile = type(profile)(model="m", layers=profile.layers, steps=tuple(steps))
    result = plan(fleet_of(["k"]), profile, Job(global_batch=64))
    assert result.plan.pipelines[0].micro_batch == 8


def test_a_given_split_is_kept():
    profile = linear_profile({"fast": 0.004, "slow": 0.012})
    job = Job(global_batch=16, batch_per_device={"h/0": 6, "h/1": 10}, allow=FREE)
    result = plan(fleet_of(["fast", "slow", "slow"]), profile, job)
    assert result.plan.samples_by_device() == {"h/0": 6, "h/1": 10}
    assert result.plan.prediction.step_s == pytest.approx(0.12)
    assert [x.device for x in result.plan.left_out] == ["h/2"]


def test_keep_all_gives_each_device_a_sample():
    profile = linear_profile({"fast": 0.004, "useless": 1.0})
    result = plan(fleet_of(["fast", "useless"]), profile, Job(global_batch=16, keep_all=True, allow=FREE))
    assert result.plan.samples_by_device() == {"h/0": 15, "h/1": 1}


def test_fewer_samples_than_devices_leaves_some_out():
    result = plan(fleet_of(["k"] * 5), linear_profile({"k": 0.01}), Job(global_batch=3, allow=FREE))
    assert sorted(result.plan.samples_by_device().values()) == [1, 1, 1]
    assert all("3 samples" in x.reason for x in result.plan.left_out)
    assert len(result.plan.left_out) == 2


def test_a_fixed_micro_batch_is_used():
    result = plan(
        fleet_of(["k", "k"]), linear_profile({"k": 0.01}), Job(global_batch=20, micro_batch=4, allow=FREE)
    )
    assert all(p.micro_batch == 4 for p in result.plan.pipelines)


def test_solo_rates_are_of_each_device_alone():
    profile = linear_profile({"fast": 0.004, "slow": 0.012}, update_s=0.016)
    prediction = plan(fleet_of(["fast", "slow"]), profile, Job(global_batch=16, allow=FREE)).plan.prediction
    assert prediction.solo_samples_per_s["h/0"] == pytest.approx(16 / 0.08)
    assert prediction.solo_samples_per_s["h/1"] == pytest.approx(16 / 0.208)


def test_bounds_hold_the_step_and_grow_with_the_spread():
    widths = []
    for spread in (0.0, 0.1):
        profile = linear_profile({"k": 0.01}, spread=spread)
        p = plan(fleet_of(["k", "k"]), profile, Job(global_batch=16, allow=FREE)).plan.prediction
        assert p.lower_s < p.step_s < p.upper_s
        widths.append(p.upper_s - p.lower_s)
    assert widths[1] > widths[0] + 0.19 * 0.08


@pytest.mark.parametrize(
    ("job", "error", "words"),
    [
        (Job(global_batch=4, batch_per_device={"h/9": 4}), UnknownNameError, "h/9"),
        (Job(global_batch=1, keep_all=True), NoPlanFitsError, "1 sample for 2 devices"),
        (Job(global_batch=4, keep_all=True, batch_per_device={"h/0": 4}), UsageError, "contradict"),
        (Job(global_batch=4, max_step_s=1e-6), NoPlanFitsError, "--max-step"),
        (Job(global_batch=4, memory_margin=0.99), NoPlanFitsError, "margin"),
    ],
)
def test_wishes_that_cannot_be_met(job, error, words):
    profile = linear_profile({"fast": 0.004, "slow": 0.012}, bytes_per_sample=100)
    with pytest.raises(error, match=words):
        plan(fleet_of(["fast", "slow"], memory=1000), profile, job)


def test_an_unknown_kind_is_named():
    with pytest.raises(UnknownNameError, match="kind 'other'"):
        plan(fleet_of(["k", "other"]), linear_profile({"k": 0.01}), Job(global_batch=4))


def test_free_memory_and_the_framework_count():
    device = Device(
        name="h/0",
        kind="k",
        memory_bytes=figure(1000),
        free_memory_bytes=figure(500),
        framework_bytes=figure(100),
    )
    profile = linear_profile({"k": 0.01}, bytes_per_sample=100, fixed_s=0.1)
    result = plan(Fleet(devices=(device,)), profile, Job(global_batch=8))
    assert result.plan.pipelines[0].micro_batch == 4
