"""What would help and what would not, and what a plan rests on."""

import pytest
from msgspec.structs import replace

from evener.core.catalogue import FleetFile, FleetLine, resolved
from evener.core.figures import line
from evener.core.fleet import Device
from evener.core.job import Job
from evener.core.plan import Prediction
from evener.core.transformer import transformer
from evener.cost.from_config import profile_from_config
from evener.errors import NoPlanFitsError, UnknownNameError, UsageError
from evener.planner import Alternative, plan
from evener.planner.baselines import usual_ways
from evener.planner.explain import advice, limiter
from evener.planner.what_if import World, changed, usual_changes
from tests.unit.planner.small import fleet_of, linear_profile
from tests.unit.planner.test_whole import chain, devices

GPT2 = transformer("gpt2")


def by_kind(*kinds: str, link: str = "PCIe 4.0 x16"):
    made = tuple(Device(name=f"h/{i}", kind=k) for i, k in enumerate(kinds))
    return resolved(FleetFile(devices=made, links=(FleetLine(a="h", b="h", kind=link),)), "a file")


def world_by_kind(*kinds: str) -> World:
    def profile(fleet):
        return profile_from_config(GPT2, fleet, global_batch=16)

    fleet = by_kind(*kinds)
    return World(fleet=fleet, profile=profile(fleet), reprofile=profile)


def step_s(world: World, batch: int = 16) -> float:
    return plan(world.fleet, world.profile, Job(global_batch=batch)).plan.prediction.step_s


def test_advice_counts_samples_a_second_and_sorts_the_best_first():
    profile = linear_profile({"k": 0.01}, param_bytes=2**20)
    result = plan(fleet_of(["k", "k"], curve=line(1e-4, 1e9)), profile, Job(global_batch=16))
    base = result.plan.prediction.step_s
    told = advice(
        result,
        (
            Alternative(name="what if add x", step_s=base * 0.995),
            Alternative(name="what if batch x2", step_s=base * 1.6, global_batch=32),
            Alternative(name="what if drop y", note="no plan fits"),
        ),
    )
    assert [a.change for a in told] == ["batch x2", "add x", "drop y"]
    assert [a.helps for a in told] == [True, False, False]
    assert told[0].gain == pytest.approx(0.25) and "+25.0% samples/s" in told[0].sentence
    assert "would not help" in told[1].sentence and "no plan fits" in told[2].sentence


def test_usual_questions_are_links_batch_and_one_more_of_each_kind():
    assert usual_changes(by_kind("T4", "T4", "A10")) == ("links x2", "batch x2", "add T4", "add A10")
    assert usual_changes(fleet_of(["k"])) == ("batch x2", "add k")


def test_the_even_pipeline_is_among_the_usual_ways():
    fleet = devices(("fast", 1e9), ("slow", 1e9), curve=line(1e-5, 1e10))
    ways = {
        a.name: a.step_s for a in usual_ways(fleet, chain({"fast": 1.0, "slow": 3.0}), Job(global_batch=8))
    }
    assert set(ways) == {"best single device", "even data parallel", "even pipeline"}
    assert ways["best single device"] == pytest.approx(64.0)


def test_a_kind_of_the_catalogue_may_be_added_and_a_slow_device_stays_slow():
    world = world_by_kind("T4")
    assert step_s(changed(world, "add A100-80")) < 0.5 * step_s(world)
    assert step_s(changed(world, "slow h/0 x2")) == pytest.approx(2 * step_s(world), rel=0.2)
    assert changed(world, "batch x2").batch == 2
    with pytest.raises(UnknownNameError, match="A100"):
        changed(world, "add A1000")
    with pytest.raises(UsageError):
        changed(world, "batch x0")


def test_a_plan_by_kinds_says_what_it_rests_on():
    world = world_by_kind("A100-80", "T4")
    result = plan(world.fleet, world.profile, Job(global_batch=16))
    assert result.plan.prediction.source == "assumed"
    text = " ".join(result.reasons)
    assert "assumed: seconds on A100-80" in text and "table: memory of" in text and "PCIe 4.0 x16" in text
    assert result.plan.prediction.upper_s > 1.2 * result.plan.prediction.step_s


def test_measured_figures_are_not_called_assumed():
    result = plan(fleet_of(["k"]), linear_profile({"k": 0.01}), Job(global_batch=4))
    assert result.plan.prediction.source == "fitted" and not any(
        "assumed: seconds" in r for r in result.reasons
    )


def test_gpt3_does_not_fit_800_gigabytes_and_the_sum_says_why():
    kinds = ["A100-80"] * 4 + ["A100-40"] * 8 + ["V100-32"] * 5
    fleet = by_kind(*kinds, link="NVLink 3")
    assert sum(d.memory_bytes.value for d in fleet.devices) == 800e9
    profile = profile_from_config(transformer("gpt3-175b"), fleet, global_batch=8)
    job = Job(global_batch=8, allow=("tensor-parallel",))
    with pytest.raises(NoPlanFitsError, match="no plan fits") as caught:
        plan(fleet, profile, job, shapes="auto")
    assert "make 2.55 TiB" in caught.value.numbers and "more of A100-80" in caught.value.remedy


def test_gpt3_needs_leave_to_split_layers_and_then_gets_a_plan():
    devices_, links = [], []
    for kind, link in (("A100-80", "NVLink 3"), ("A100-40", "NVLink 3"), ("V100-32", "NVLink 2")):
        for h in range(4):
            host = f"{kind}-{h}"
            devices_ += [Device(name=f"{host}/gpu{i}", kind=kind) for i in range(8)]
            links.append(FleetLine(a=host, b=host, kind=link))
    names = [x.a for x in links]
    links += [FleetLine(a=a, b=b, kind="InfiniBand HDR") for i, a in enumerate(names) for b in names[i + 1 :]]
    fleet = resolved(FleetFile(devices=tuple(devices_), links=tuple(links)), "a file")
    profile = profile_from_config(transformer("gpt3-175b"), fleet, global_batch=64)
    job = Job(global_batch=64, micro_batch=1)
    with pytest.raises(NoPlanFitsError, match="--allow tensor-parallel"):
        plan(fleet, profile, job, shapes="auto")
    result = plan(fleet, profile, replace(job, allow=("tensor-parallel",)), shapes="auto")
    memory = result.plan.prediction.memory_bytes
    assert all(b <= 0.9 * fleet.device(n).memory_bytes.value for n, b in memory.items())
    assert sum(memory.values()) > 16 * 174.6e9
    assert result.bound_s <= result.plan.prediction.step_s < 2 * result.bound_s


def test_the_limit_is_told_whatever_it_is():
    """Two devices that wait for one another longest ended in a KeyError; rows of tables in owners' words."""
    seconds = {"compute": 4.0, "input": 3.0, "overhead": 3.0, "wait": 10.0}
    told = Prediction(step_s=20.0, lower_s=19.0, upper_s=21.0, seconds={"h/0": seconds, "h/1": seconds})
    assert limiter(told) == "h/0 waits for slower devices for 10 s of a step of 20 s"
    rows = replace(told, seconds={"h/0": {"compute": 1.0, "transfer": 19.0, "wait": 0.0}})
    assert "rows" in limiter(rows) and "owners" in limiter(replace(rows, owned_bytes={"h/0": 1}))
