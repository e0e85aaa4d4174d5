"""Layers that share storage on stages of their own: their gradient is summed once, by the holders of all."""

import pytest
from msgspec.structs import replace

from evener.core.figures import Figure, line
from evener.core.fleet import Device, Fleet, Link
from evener.core.job import Job
from evener.core.transformer import presets
from evener.cost.evaluate import CostModel
from evener.cost.from_config import profile_from_config
from evener.cost.memory import model_bytes, tied_places
from evener.cost.overlap import gradient_buckets
from evener.planner import plan
from evener.schedules import make
from evener.sim import plan_costs, step_seconds

GPT2 = presets()["gpt2"]


def measured(value: float) -> Figure:
    return Figure(value=value, source="measured")


def two_hosts(bytes_per_s: float) -> Fleet:
    """Two cards, each on a host of its own."""
    cards = tuple(
        Device(
            name=f"{host}/gpu",
            kind="card",
            memory_bytes=measured(24e9),
            flops={"float32": measured(10e12)},
            bytes_per_s=measured(5e11),
            launch_s=measured(1e-5),
        )
        for host in "ab"
    )
    return Fleet(devices=cards, links=(Link(a="a", b="b", curve=line(1e-4, bytes_per_s)),))


def test_what_is_summed_adds_up_to_the_models_gradients():
    profile = profile_from_config(GPT2, two_hosts(1e9), global_batch=4)
    data, whole = model_bytes(profile), 4 * GPT2.num_params
    matrix = 4 * GPT2.vocabulary * GPT2.hidden
    assert tied_places(profile.layers) == {0: (0, len(profile.layers) - 1)}
    assert data.summed.sum() == pytest.approx(whole)
    assert data.gradients[-1] == pytest.approx(whole + matrix, rel=1e-3), "two stages hold it twice"
    assert sum(b.num_bytes for b in gradient_buckets(profile)) == pytest.approx(whole, rel=1e-6)


def test_a_cut_between_them_counts_their_sum():
    """GPT-2 over 1 Gbit/s: two stages were told to take 2.0 s a step, played they took 3.4, one card 2.8."""
    fleet = two_hosts(1.1e8)
    for tied in (False, True):
        profile = profile_from_config(replace(GPT2, tied=tied), fleet, global_batch=16)
        found = plan(fleet, profile, Job(global_batch=16), shapes="all").plan
        assert len(found.devices) == (1 if tied else 2)
        costs = plan_costs(CostModel(fleet=fleet, profile=profile), found)
        played = step_seconds(make(found, costs=costs), found, costs)
        assert played == pytest.approx(found.prediction.step_s)
