"""Seconds and bytes of stages whose parameters live on the host."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from evener.core.figures import Figure, line
from evener.core.fleet import Device, Disk, Fleet, Link
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.profile import Layer, Profile, Timing
from evener.cost.evaluate import CostModel, evaluate
from evener.cost.memory import model_bytes
from evener.cost.resident_memory import home_bytes, resident_peak, resident_peaks
from evener.cost.residing import backward_ends, forward_ends, resident, resident_tables
from evener.errors import UsageError

MB = 10**6


def given(value: float) -> Figure:
    return Figure(value=value, source="measured")


def profile(num_layers: int = 4, *, params: float = 100 * MB, saved: float = 10 * MB) -> Profile:
    """Layers of `params` bytes that take 1 ms forward and 2 back a sample, and have AdamW's state."""
    layers = tuple(
        Layer(
            name=f"l{i}",
            num_params=int(params / 4),
            param_bytes=int(params),
            saved_bytes_per_sample=int(saved),
            output_bytes_per_sample=1000,
        )
        for i in range(num_layers)
    )
    timings = tuple(
        Timing(
            layer=x.name,
            kind="card",
            micro_batch=n,
            forward_s=given(1e-3 * n),
            backward_s=given(2e-3 * n),
            update_s=given(1e-4),
        )
        for x in layers
        for n in (1, 8)
    )
    return Profile(
        model="chain",
        layers=layers,
        timings=timings,
        gradient_bytes=int(params) * num_layers,
        state_bytes=2 * int(params) * num_layers,
        update_bytes=0,
    )


def fleet(*, gb_per_s: float = 20.0, link: bool = True) -> Fleet:
    card = Device(name="a/gpu0", kind="card", type="cuda", memory_bytes=given(1e9))
    cpu = Device(name="a/cpu", kind="cpu", bytes_per_s=given(4e10), memory_bytes=given(1e12))
    links = (Link(a="a/gpu0", b="a", curve=line(1e-9, gb_per_s * 1e9)),) if link else ()
    return Fleet(devices=(card,), links=links, hosts=(cpu,))


def plan(residence: str | None, *, samples: int = 4, num: int = 2, recompute: bool = False) -> Plan:
    stage = Stage(
        layers=tuple(f"l{i}" for i in range(4)),
        shares=(Share(devices=("a/gpu0",), samples=samples),),
        residence=residence,
        recompute=recompute,
    )
    pipeline = Pipeline(samples=samples * num, micro_batch=samples, stages=(stage,))
    return Plan(global_batch=samples * num, pipelines=(pipeline,), schedule="1f1b")


def test_copies_that_computing_hides_cost_nothing_and_longer_ones_set_the_pace():
    assert forward_ends([2, 2, 2], [1, 1, 1], (0, 1)) == ([2, 4, 6], [0, 0, 0])
    assert forward_ends([2, 2, 2], [3, 3, 3], (0, 1)) == ([2, 4, 7], [0, 0, 1])
    assert forward_ends([2, 2, 2], [3, 3, 3], ()) == ([5, 8, 11], [3, 4, 5])


def test_a_backward_ends_when_its_last_gradients_are_added():
    assert backward_ends([2, 2, 2], [3, 3, 3], [3, 3, 3], [1, 1, 1]) == ([6, 10, 14], [3, 3, 3])
    assert backward_ends([2, 2, 2], [0, 0, 0], [0, 0, 0], [0, 0, 0]) == ([2, 4, 6], [0, 0, 0])
    assert backward_ends([5, 5, 5], [1, 1, 1], [1, 1, 1], [1, 1, 1]) == ([7, 12, 17], [1, 1, 1])


@pytest.mark.parametrize("residence", ["host", "host-optimizer"])
@pytest.mark.parametrize("recompute", [True, False])
def test_tables_say_of_each_run_of_layers_what_one_alone_says(residence: str, recompute: bool):
    model = CostModel(fleet=fleet(gb_per_s=50.0), profile=profile())
    f, b, once = resident_tables(model, "a/gpu0", 2, residence, recompute=recompute)
    names = [x.name for x in model.profile.layers]
    peaks = resident_peaks(model.bytes, names, 2, 3, residence, recompute=recompute)
    for i, j in itertools.combinations(range(5), 2):
        share = Share(devices=("a/gpu0",), samples=2)
        stage = Stage(layers=tuple(names[i:j]), shares=(share,), residence=residence, recompute=recompute)
        alone = resident(model, stage, "a/gpu0", 2)
        assert (f[i, j], b[i, j]) == pytest.approx((alone.forward_s, alone.backward_s))
        assert once[i, j] == pytest.approx(alone.update_s + alone.first_s - (j - i) * 1e-4)
        one = resident_peak(model.bytes, names, (i, j), 2, 3, residence, recompute=recompute)
        assert peaks[i, j] == pytest.approx(one)
    assert np.isinf(f[3, 3])


def test_a_plan_is_priced_with_what_shows_of_the_copies():
    model = CostModel(fleet=fleet(), profile=profile())
    there, apart, away = (evaluate(model, plan(r)) for r in (None, "host-optimizer", "host"))
    # 400 MB of parameters and two tensors of state: 21 passes at 40 GB/s, and gradients at 20 GB/s before.
    assert apart.seconds["a/gpu0"]["optimizer"] == pytest.approx(21 * 4e8 / 4e10 + 4e8 / 2e10, rel=1e-3)
    assert away.seconds["a/gpu0"]["optimizer"] == pytest.approx(21 * 4e8 / 4e10)
    # a layer's 5 ms on the link are longer than 4 ms of its forward: the first shows whole, then 1 ms each
    assert apart.seconds["a/gpu0"]["transfer"] == pytest.approx(8e-3, rel=1e-3)
    assert there.step_s < apart.step_s < away.step_s
    for cost in (there, apart, away):
        assert sum(cost.seconds["a/gpu0"].values()) == pytest.approx(cost.step_s)


def test_less_memory_is_held_the_more_lives_on_the_host():
    data = model_bytes(profile())
    names = [f"l{i}" for i in range(4)]

    def peak(residence: str, **more: Any) -> float:
        return resident_peak(data, names, (0, 4), 1, 1, residence, **more)

    # parameters and gradients; two layers' of the one, two layers' of the other, activations
    assert peak("host-optimizer") == pytest.approx(8e8 + 4e7, rel=0.01)
    assert peak("host") == pytest.approx(4e8 + 3e7, rel=0.01)
    assert peak("host", recompute=True) < peak("host")


def test_without_a_link_to_the_host_there_is_no_price():
    model = CostModel(fleet=fleet(link=False), profile=profile())
    with pytest.raises(UsageError, match="no link between them"):
        evaluate(model, plan("host"))


def test_state_on_disk_is_read_and_written_once_a_step_and_leaves_the_host():
    (cpu,) = fleet().hosts
    disk = Disk(read_bytes_per_s=given(2e9), write_bytes_per_s=given(1e9), free_bytes=given(1e12))
    model = CostModel(fleet=replace(fleet(), hosts=(replace(cpu, disk=disk),)), profile=profile())
    stage = plan("host").pipelines[0].stages[0]
    there = resident(model, stage, "a/gpu0", 4)
    away = resident(model, replace(stage, state_on_disk=True), "a/gpu0", 4)
    assert away.update_s - there.update_s == pytest.approx(8e8 / 2e9 + 8e8 / 1e9)
    assert dataclasses.replace(away, update_s=there.update_s) == there
    assert home_bytes(model.bytes, 0, 4) == pytest.approx(16e8)
    assert home_bytes(model.bytes, 0, 4, state_on_disk=True) == pytest.approx(12e8)
    with pytest.raises(UsageError, match="of which the fleet says nothing"):
        resident(CostModel(fleet=fleet(), profile=profile()), replace(stage, state_on_disk=True), "a/gpu0", 4)


def test_groups_of_devices_hold_no_parts_on_hosts():
    model = CostModel(fleet=fleet(), profile=profile())
    stage = plan("host").pipelines[0].stages[0]
    team = replace(stage, shares=(Share(devices=("a/gpu0", "a/gpu1"), samples=4),))
    with pytest.raises(UsageError, match="tensor-parallel"):
        resident(model, team, "a/gpu0", 4)


def test_a_layer_without_parameters_hides_no_neighbour() -> None:
    """What is brought next is the nearest layer with parameters, whatever runs between."""
    found = profile(5)
    layers = tuple(
        replace(x, param_bytes=0, num_params=0) if i % 2 else x for i, x in enumerate(found.layers)
    )
    bare = model_bytes(replace(found, layers=layers, gradient_bytes=3 * int(100 * MB)))
    names = [x.name for x in layers]
    between = resident_peak(bare, names, (0, 5), 1, 1, "host")
    params, made = bare.parameters[1] - bare.parameters[0], bare.gradients[1] - bare.gradients[0]
    assert between >= 2 * params + 2 * made
