"""Tensor-parallel groups: bytes by degree, messages and sums in lanes, and the simulator's second opinion."""

import pytest
from msgspec.structs import replace

from evener.core.figures import Figure, line
from evener.core.fleet import Device, Fleet, Link
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.profile import GroupBytes, Layer, Profile, StepTiming, Timing
from evener.cost.communication import Network
from evener.cost.evaluate import CostModel, evaluate
from evener.cost.memory import model_bytes, stage_memory
from evener.cost.trainer import Trainer
from evener.schedules import make
from evener.sim import plan_costs, simulate

RATE = 1e9


def fleet(*, bus: bool, hosts: int = 4) -> Fleet:
    """Hosts of four; 1 ms + 1 GB/s between them."""
    devices = tuple(Device(name=f"h{h}/{i}", kind="k") for h in range(hosts) for i in range(4))
    links = [
        Link(a=f"h{a}", b=f"h{b}", curve=line(1e-3, RATE), bus=f"{a}|{b}" if bus else None)
        for a in range(hosts)
        for b in range(a)
    ]
    links += [Link(a=f"h{h}", b=f"h{h}", curve=line(1e-5, 1e12)) for h in range(hosts)]
    return Fleet(devices=devices, links=tuple(links))


def group(host: int, size: int = 4) -> tuple[str, ...]:
    return tuple(f"h{host}/{i}" for i in range(size))


def profile(*degrees: int, repeated: int = 0) -> Profile:
    """Four layers of 4 ms in all; 40 MB of parameters each, 1 MB crosses, 8 MB saved."""
    layers = tuple(
        Layer(
            name=n,
            num_params=10**7,
            param_bytes=40 * 10**6,
            output_bytes_per_sample=10**6,
            saved_bytes_per_sample=8 * 10**6,
        )
        for n in "abcd"
    )
    timings = tuple(
        Timing(
            layer=n,
            kind="k",
            micro_batch=1,
            tensor_parallel=degree,
            forward_s=Figure(value=4e-3 / degree, source="table"),
            backward_s=Figure(value=8e-3 / degree, source="table"),
        )
        for degree in degrees
        for n in "abcd"
    )
    rows = tuple(
        GroupBytes(
            layer=n,
            tensor_parallel=d,
            param_bytes=40 * 10**6 // d,
            output_bytes_per_sample=10**6,
            saved_bytes_per_sample=8 * 10**6 // d + repeated,
        )
        for d in degrees
        for n in "abcd"
        if repeated
    )
    return Profile(
        model="m", layers=layers, timings=timings, group_bytes=rows, gradient_bytes=160 * 10**6, state_bytes=0
    )


def told(value: float) -> Figure:
    return Figure(value=value, source="table")


def plan(*pipelines: tuple[tuple[str, ...], ...], samples: int = 8) -> Plan:
    """Pipelines of as many even stages as they name groups."""
    made = []
    for groups in pipelines:
        each = 4 // len(groups)
        stages = tuple(
            Stage(layers=tuple("abcd"[i * each : (i + 1) * each]), shares=(Share(devices=g, samples=1),))
            for i, g in enumerate(groups)
        )
        made.append(Pipeline(samples=samples, micro_batch=1, stages=stages))
    return Plan(global_batch=samples * len(made), pipelines=tuple(made), schedule="1f1b")


def test_every_device_of_a_group_gets_the_whole_message():
    """1 MB from 4 to 4: at once on links of their own, a fourth of the rate each on one bus."""
    alone, shared = Network(fleet=fleet(bus=False)), Network(fleet=fleet(bus=True))
    assert alone.group_send_s(group(0), group(1), 1e6) == pytest.approx(2e-3)
    assert shared.group_send_s(group(0), group(1), 1e6) == pytest.approx(5e-3)
    assert alone.group_send_s(group(0, 2), group(1, 4), 1e6) == pytest.approx(2 * 2e-3)
    assert shared.group_send_s(group(0, 4), group(1, 2), 1e6) == pytest.approx(5e-3)
    assert shared.group_send_s(group(0), group(0), 1e6) == 0


def test_lanes_share_a_bus():
    """Two members, 4 lanes of 1 MB: 2 rounds of 4 times half a MB."""
    shared = Network(fleet=fleet(bus=True))
    assert shared.all_reduce_s(("h0/0", "h1/0"), 1e6, 4) == pytest.approx(2 * (1e-3 + 4 * 0.5e-3))
    alone = Network(fleet=fleet(bus=False))
    assert alone.all_reduce_s(("h0/0", "h1/0"), 1e6, 4) == alone.all_reduce_s(("h0/0", "h1/0"), 1e6)


def test_bytes_of_a_group_are_even_parts_unless_the_profile_knows():
    even = model_bytes(profile(1, 4), tensor_parallel=4)
    known = model_bytes(profile(1, 4, repeated=10**6), tensor_parallel=4)
    held = [stage_memory(m, 0, 2, samples=1, in_flight=1) for m in (even, known)]
    assert held[0].parameters == held[1].parameters == 20e6
    assert [h.activations for h in held] == [pytest.approx(4e6), pytest.approx(6e6)]
    assert held[1].boundary == 2 * 1e6


def test_a_flat_bucket_is_one_more_copy_and_comes_after_the_last_backward():
    flat = Trainer(bucket_bytes=float("inf"))
    held = stage_memory(model_bytes(profile(1), trainer=flat), 0, 4, samples=1, in_flight=1)
    assert held.reduction == held.gradients == 160e6
    model = CostModel(fleet=fleet(bus=True), profile=profile(1), trainer=flat)
    cost = evaluate(model, plan((("h0/0",),), (("h1/0",),)))
    whole = model.network.all_reduce_s(("h0/0", "h1/0"), 160e6)
    assert cost.step_s - cost.compute_end_s == pytest.approx(whole)


def test_transient_bytes_go_by_the_largest_layer():
    held = model_bytes(profile(1), trainer=Trainer(transient_layers=2.5))
    assert stage_memory(held, 1, 4, samples=3, in_flight=2).transient == pytest.approx(3 * 2.5 * 8e6)


def test_fixed_seconds_of_a_step_are_added_once():
    two = plan((("h0/0",), ("h1/0",)))
    steps = [
        evaluate(CostModel(fleet=fleet(bus=True), profile=profile(1), trainer=Trainer(step_s=s)), two).step_s
        for s in (0.0, 0.5)
    ]
    assert steps[1] - steps[0] == pytest.approx(0.5)


@pytest.mark.parametrize("degrees", [(1, 1), (4, 4)])
def test_the_simulator_agrees_on_a_plan_of_groups(degrees):
    """Two pipelines of two groups: messages and sums over shared buses in both evaluators."""
    first, second = degrees
    model = CostModel(fleet=fleet(bus=True), profile=profile(1, 4))
    made = plan((group(0, first), group(1, second)), (group(2, first), group(3, second)))
    costs = plan_costs(model, made)
    played = simulate(make(made), made, costs)
    assert played.step_s == pytest.approx(evaluate(model, made).step_s, rel=2e-2)


def test_a_group_that_holds_the_model_updates_its_part():
    """Its update was told as that of a device alone: all parameters instead of a fourth of them."""
    step = StepTiming(
        kind="k", micro_batch=1, forward_s=told(16e-3), backward_s=told(32e-3), update_s=told(1.0)
    )
    held = replace(
        profile(1, 4),
        timings=tuple(replace(t, update_s=told(0.25 / t.tensor_parallel)) for t in profile(1, 4).timings),
        steps=(step,),
    )
    model = CostModel(fleet=fleet(bus=True), profile=held)
    for members in (("h0/0",), group(0)):
        made = plan((members,))
        assert evaluate(model, made).seconds["h0/0"]["optimizer"] == pytest.approx(1.0 / len(members))
        assert plan_costs(model, made).update_s["h0/0"] == pytest.approx(1.0 / len(members))


def test_groups_of_different_degrees_meet_in_the_lanes_of_the_smaller():
    flat = Trainer(bucket_bytes=float("inf"))
    model = CostModel(fleet=fleet(bus=True), profile=profile(2, 4), trainer=flat)
    cost = evaluate(model, plan((group(0, 2),), (group(1, 4),)))
    expected = model.network.all_reduce_s(("h0/0", "h1/0"), 80e6, 2)
    assert cost.step_s - cost.compute_end_s == pytest.approx(expected)
