"""A model by its configuration on kinds by their name: seconds, bytes, groups, and what cannot be priced."""

import pytest
from msgspec.structs import replace

from evener.core.catalogue import FleetFile, FleetLine, resolved
from evener.core.figures import Figure
from evener.core.fleet import Device
from evener.core.transformer import transformer
from evener.cost.evaluate import CostModel
from evener.cost.from_config import EFFICIENCY, profile_from_config
from evener.errors import UnknownNameError, UsageError

GPT2 = transformer("gpt2")


def fleet(*kinds, link=""):
    devices = tuple(Device(name=f"h/{i}", kind=k) for i, k in enumerate(kinds))
    links = (FleetLine(a="h", b="h", kind=link),) if link else ()
    return resolved(FleetFile(devices=devices, links=links), "a file")


def test_seconds_are_work_over_rate_plus_launches():
    profile = profile_from_config(GPT2, fleet("A100-80"), global_batch=8)
    model = CostModel(fleet=fleet("A100-80"), profile=profile)
    forward, backward = model.layers("A100-80").seconds(8)
    busy = 8 * GPT2.block_flops / (19.5e12 * EFFICIENCY)
    assert forward[1] == pytest.approx(busy + 14e-5) and backward[1] == pytest.approx(2 * forward[1])
    assert model.layers("A100-80").seconds(3)[0][1] == pytest.approx(3 / 8 * busy + 14e-5)
    assert all(t.forward_s.source == "assumed" and t.forward_s.spread > 0 for t in profile.timings)


def test_memory_for_adam_is_sixteen_bytes_a_parameter_however_it_is_cut():
    profile = profile_from_config(transformer("gpt3-175b"), fleet("A100-80"), global_batch=1)
    model = CostModel(fleet=fleet("A100-80"), profile=profile)
    held = model.bytes.parameters + model.bytes.gradients + model.bytes.optimizer
    assert held[-1] == pytest.approx(16 * 174.6e9, rel=0.01) and held[-1] > 3 * 800e9
    assert held[2] - held[1] == pytest.approx(16 * 12 * 12288**2, rel=0.001)


def test_a_tied_matrix_on_one_device_counts_once():
    (step, *_) = profile_from_config(GPT2, fleet("A100-80"), global_batch=1).steps
    untied = profile_from_config(replace(GPT2, tied=False), fleet("A100-80"), global_batch=1).steps[0]
    assert untied.peak_bytes.value - step.peak_bytes.value == pytest.approx(16 * 50257 * 768, rel=0.001)


def test_groups_need_links_and_hold_their_part():
    assert {
        t.tensor_parallel for t in profile_from_config(GPT2, fleet("V100", "V100"), global_batch=1).timings
    } == {1}
    linked = fleet("V100", "V100", "T4", link="NVLink 2")
    profile = profile_from_config(GPT2, linked, global_batch=4)
    assert {(t.kind, t.tensor_parallel) for t in profile.timings} == {("V100", 1), ("V100", 2), ("T4", 1)}
    model = CostModel(fleet=linked, profile=profile)
    alone, pair = model.layers("V100").seconds(4), model.layers("V100", 2).seconds(4)
    sums = 2 * model.network.all_reduce_s(("h/0", "h/1"), 4 * 1024 * 768 * 4)
    assert pair[0][1] - sums == pytest.approx((alone[0][1] - 14e-5) / 2 + 14e-5)
    assert model.bytes_at(2).parameters[-1] == pytest.approx(model.bytes.parameters[-1] / 2)


def test_what_cannot_be_priced_says_why():
    with pytest.raises(UnknownNameError, match="NVIDIA A100-SXM4-80GB"):
        profile_from_config(GPT2, fleet("A100 81GB"), global_batch=1)
    with pytest.raises(UnknownNameError, match="bfloat16") as caught:
        profile_from_config(GPT2, fleet("A100-80", "V100-32"), global_batch=1, precision="bfloat16")
    assert "h/1 (V100-32)" in caught.value.what and "float16" in caught.value.numbers
    with pytest.raises(UsageError, match="one of: float32"):
        profile_from_config(GPT2, fleet("T4"), global_batch=1, precision="int8")
    slow = Device(name="h/1", kind="T4", flops={"float32": Figure(value=1e12, source="assumed")})
    two = resolved(FleetFile(devices=(Device(name="h/0", kind="T4"), slow)), "a file")
    with pytest.raises(UsageError, match="different figures"):
        profile_from_config(GPT2, two, global_batch=1)
