"""Plans of all shapes on random instances: against enumeration, simpler plans and parts of the fleet."""

import pytest

from benchmarks.planner_oracle import Enumeration, instance
from evener.core.files import decode, encode
from evener.core.plan import Plan
from evener.cost.evaluate import CostModel, evaluate
from evener.cost.memory import usable_bytes
from evener.errors import NoPlanFitsError
from evener.planner import plan


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", [3, 7, 12, 16, 79, 200, 219, 257])
def test_no_plan_by_enumeration_is_faster(seed, tied):
    fleet, profile, job = instance(seed, tied=tied)
    result = plan(fleet, profile, job, shapes="all")
    seconds = result.plan.prediction.step_s
    best, _ = Enumeration(fleet, profile, job).best(seconds)
    assert seconds <= best * (1 + 1e-9)
    assert result.bound_s <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(40, 52))
def test_never_worse_than_simpler_plans_or_a_part_of_the_fleet(seed):
    fleet, profile, job = instance(seed)
    result = plan(fleet, profile, job, shapes="all")
    seconds = result.plan.prediction.step_s
    assert all(seconds <= a.step_s * (1 + 1e-9) for a in result.alternatives if a.step_s is not None)
    for left in fleet.devices:
        rest = tuple(d.name for d in fleet.devices if d != left)
        try:
            part = plan(fleet.only(rest), profile, job, shapes="all")
        except NoPlanFitsError:
            continue
        assert seconds <= part.plan.prediction.step_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(60, 80))
def test_a_plan_keeps_every_promise_of_the_format(seed):
    fleet, profile, job = instance(seed)
    try:
        result = plan(fleet, profile, job, shapes="all")
    except NoPlanFitsError:
        return
    found = result.plan
    assert decode(encode(found), Plan, "plan") == found
    assert sum(found.samples_by_device().values()) >= job.global_batch
    assert {x.device for x in found.left_out} | set(found.devices) == {d.name for d in fleet.devices}
    names = [x.name for x in profile.layers]
    for pipeline in found.pipelines:
        assert [n for s in pipeline.stages for n in s.layers] == names
    for name, held in found.prediction.memory_bytes.items():
        assert held <= usable_bytes(fleet.device(name), job.memory_margin) * (1 + 1e-9)
    assert evaluate(CostModel(fleet=fleet, profile=profile), found).step_s == found.prediction.step_s
    again = plan(fleet, profile, job, shapes="all")
    assert encode(again.plan) == encode(found)
