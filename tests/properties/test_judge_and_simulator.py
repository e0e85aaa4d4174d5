"""The judge of plans and the simulator price random plans alike: two ways to one number."""

import random

import pytest
from msgspec.structs import replace

from benchmarks.planner_oracle import figure, instance
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.profile import Profile, StepTiming
from evener.cost.evaluate import CostModel, evaluate
from evener.cost.sums import with_groups
from evener.schedules import make
from evener.sim import plan_costs, simulate, step_seconds


def with_steps(profile: Profile) -> Profile:
    """The profile with whole-model steps: a tenth longer than the layers, reading, update and overhead."""
    steps = []
    for kind in profile.kinds:
        for size in (1, 2, 4, 8):
            rows = [t for t in profile.timings if t.kind == kind and t.micro_batch == size]
            forward, backward = (sum(getattr(t, f).value for t in rows) for f in ("forward_s", "backward_s"))
            steps.append(
                StepTiming(
                    kind=kind,
                    micro_batch=size,
                    forward_s=figure(1.1 * forward),
                    backward_s=figure(1.1 * backward),
                    update_s=figure(3e-4),
                    input_s=figure(1e-4 * size),
                    step_overhead_s=figure(2e-4),
                )
            )
    return replace(profile, steps=tuple(steps))


def random_plan(r: random.Random, names: list[str], layers: list[str], global_batch: int) -> Plan:
    """Pipelines of one to three stages on devices of their own; one of them may have no samples."""
    r.shuffle(names)
    pipelines: list[Pipeline] = []
    left = global_batch
    while names and len(pipelines) < 3:
        count = r.randint(1, min(3, len(names), len(layers)))
        taken, names = names[:count], names[count:]
        size, samples = r.choice((1, 2, 3, 4, 8)), r.randint(0, left)
        edges = [0, *sorted(r.sample(range(1, len(layers)), count - 1)), len(layers)]
        stages = tuple(
            Stage(
                layers=tuple(layers[a:b]),
                shares=(Share(devices=(device,), samples=size),),
                recompute=r.random() < 0.3,
            )
            for device, a, b in zip(taken, edges, edges[1:], strict=False)
        )
        pipelines.append(Pipeline(samples=samples, micro_batch=size, stages=stages))
        left -= samples
    pipelines[0] = replace(pipelines[0], samples=pipelines[0].samples + left)
    return Plan(global_batch=global_batch, pipelines=tuple(pipelines), schedule="1f1b")


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_of_single_shares_takes_the_same(seed):
    """Played, sums hid behind what is recomputed before a backward; the judge knew of no sum of tied layers.

    What crosses a cut is small here: where messages wait for one another, as only the player knows, it takes
    up to a twentieth more.
    """
    r = random.Random(seed)
    fleet, profile, job = instance(seed, tied=r.random() < 0.4)
    thin = tuple(replace(x, output_bytes_per_sample=x.output_bytes_per_sample // 64) for x in profile.layers)
    profile = replace(profile, layers=thin)
    model = CostModel(fleet=fleet, profile=with_steps(profile) if r.random() < 0.5 else profile)
    names = [d.name for d in fleet.devices]
    plan = random_plan(r, names, [x.name for x in profile.layers], job.global_batch)
    if r.random() < 0.5:
        plan = with_groups(model, plan)
    costs = plan_costs(model, plan)
    schedule = make(plan, costs=costs)
    judged, played = evaluate(model, plan), step_seconds(schedule, plan, costs)
    assert judged.step_s == pytest.approx(played, rel=1e-9)
    assert simulate(schedule, plan, costs).step_s == pytest.approx(played, rel=1e-9)
    for causes in judged.seconds.values():
        assert sum(causes.values()) == pytest.approx(judged.step_s)
