"""State in parts where pipelines cut the model: what fits, what is chosen, and what is said."""

import random

import pytest
from msgspec.structs import replace

from evener.core.figures import Figure, line
from evener.core.fleet import Device, Fleet, Link
from evener.core.job import Job
from evener.core.ownership import check_owners, held_by, holders_of
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.profile import Layer, Profile, Timing
from evener.cost.evaluate import evaluate
from evener.cost.memory import usable_bytes
from evener.cost.model import CostModel
from evener.errors import NoPlanFitsError
from evener.planner import plan
from evener.planner.owned_stages import parts_by_memory
from evener.report.plans import plan_text

MB = 1_000_000
NAMES = ("a/0", "a/1", "b/0", "b/1")


def seconds(value: float) -> Figure:
    return Figure(value=value, source="measured")


def profile_of(num_layers: int = 8, param_bytes: int = 10 * MB) -> Profile:
    """Layers alike, of 10 ms and 20 ms a sample; Adam's state is twice the parameters."""
    layers = tuple(
        Layer(
            name=f"l{i}",
            num_params=param_bytes // 4,
            param_bytes=param_bytes,
            output_bytes_per_sample=4000,
            saved_bytes_per_sample=100_000,
            flops_per_sample=1.0,
        )
        for i in range(num_layers)
    )
    timings = tuple(
        Timing(
            layer=x.name,
            kind="k",
            micro_batch=b,
            forward_s=seconds(0.01 * b),
            backward_s=seconds(0.02 * b),
            update_s=seconds(0.001),
        )
        for x in layers
        for b in (1, 2, 4, 8)
    )
    return Profile(model="m", layers=layers, timings=timings, state_bytes=2 * num_layers * param_bytes)


def fleet_of(*mb: float, rate: float = 12e6) -> Fleet:
    """Two hosts of two devices, joined by 100 Mbit/s unless told."""
    devices = tuple(
        Device(name=n, kind="k", memory_bytes=Figure(value=m * MB, source="assumed"))
        for n, m in zip(NAMES, mb, strict=True)
    )
    inside = tuple(Link(a=h, b=h, curve=line(1e-5, 1e10)) for h in "ab")
    return Fleet(devices=devices, links=(*inside, Link(a="a", b="b", curve=line(1e-4, rate))))


def hybrid(*cuts: int, num_layers: int = 8) -> Plan:
    """Pipelines a/0, b/0 and a/1, b/1 with the first `cuts` layers on host a."""
    names = [f"l{i}" for i in range(num_layers)]
    pipelines = tuple(
        Pipeline(
            samples=4,
            micro_batch=1,
            stages=tuple(
                Stage(layers=tuple(run), shares=(Share(devices=(d,), samples=1),))
                for run, d in ((names[:cut], f"a/{k}"), (names[cut:], f"b/{k}"))
            ),
        )
        for k, cut in enumerate(cuts)
    )
    return Plan(global_batch=8, pipelines=pipelines, schedule="1f1b")


def test_memory_that_holds_no_copy_of_the_state_holds_parts_of_it() -> None:
    """160 MB each: what several devices could hold of a layer does not fit with all of its state on each."""
    fleet, profile = fleet_of(160, 160, 160, 160), profile_of()
    whole = plan(fleet, profile, Job(global_batch=16), shapes="all")
    found = plan(fleet, profile, Job(global_batch=16, state="auto"), shapes="all")
    told, before = found.plan.prediction, whole.plan.prediction
    assert told is not None and before is not None
    assert held_by(found.plan) == "optimizer" and not found.plan.is_data_parallel
    assert told.step_s < 0.95 * before.step_s
    check_owners(found.plan, [x.name for x in profile.layers])
    holders = holders_of(found.plan)
    assert {o.layer for o in found.plan.owners} == {n for n, held in holders.items() if len(held) > 1}
    for name, held in told.memory_bytes.items():
        assert held <= usable_bytes(fleet.device(name), 0.1)
    model = CostModel(fleet=fleet, profile=profile)
    assert evaluate(model, found.plan).step_s == pytest.approx(told.step_s)
    assert sum(told.owned_bytes.values()) == pytest.approx(160 * MB, rel=0.01)
    assert "in parts by memory among the devices that hold a layer" in found.plan.why
    assert any(a.name.startswith("all state on every device") for a in found.alternatives)
    assert "the optimiser's state in parts" in plan_text(found.plan)


def test_enough_memory_leaves_all_state_on_every_device() -> None:
    found = plan(fleet_of(900, 900, 900, 900), profile_of(), Job(global_batch=16, state="auto"), shapes="all")
    assert held_by(found.plan) is None


def test_state_asked_for_where_only_a_cut_model_fits() -> None:
    """One stage needs 160 MB of parameters and gradients alone."""
    fleet, profile, job = fleet_of(170, 170, 170, 170), profile_of(), Job(global_batch=16, state="gradients")
    found = plan(fleet, profile, job, shapes="all")
    assert held_by(found.plan) == "gradients" and not found.plan.is_data_parallel
    with pytest.raises(NoPlanFitsError):
        plan(fleet, profile, replace(job, state="optimizer"), shapes="data-parallel")


@pytest.mark.parametrize("seed", range(30))
def test_parts_fit_whatever_the_cuts_and_memories_are(seed: int) -> None:
    draw = random.Random(seed)
    cuts = draw.randint(1, 7), draw.randint(1, 7)
    fleet = fleet_of(*(draw.choice((120, 180, 260, 400, 700)) for _ in NAMES))
    model, shape = CostModel(fleet=fleet, profile=profile_of()), hybrid(*cuts)
    usable = {d.name: usable_bytes(d, 0.1) for d in fleet.devices}
    held = draw.choice(("optimizer", "gradients"))
    owners = parts_by_memory(model, shape, held, usable)  # type: ignore[arg-type]
    alike = evaluate(model, shape).memory_bytes
    if owners:
        found = evaluate(model, replace(shape, owners=owners)).memory_bytes
        assert all(found[d] <= usable[d] for d in found)
    else:
        assert any(alike[d] > usable[d] for d in alike), "what fits whole fits in parts"
