"""Which ways to exchange gradients a job refuses, wherever it is made."""

from typing import Any

import pytest

from evener.core.fewer import Fewer, fewer_in
from evener.core.fleet import Device, Fleet
from evener.core.job import Job
from evener.errors import UsageError
from evener.session.request import Request

ONE = Fleet(devices=(Device(name="lab/a", kind="cpu"),))
EXCLUDED = [
    ({"state": "optimizer", "fewer": ("local:16",)}, "--state optimizer and --fewer local:16:1:0 exclude"),
    ({"state": "auto", "fewer": ("accumulate:4",)}, "--state auto and --fewer accumulate:4 exclude"),
    ({"state": "parameters", "compress": ("int8",)}, "--state parameters and --compress int8 exclude"),
    ({"sums": "ring", "fewer": ("local:4",)}, "--sums ring and --fewer local:4:1:0 exclude"),
    ({"sums": "ring", "compress": ("int8", "bf16")}, "--sums ring and --compress int8,bf16 exclude"),
    ({"compress": ("int7",)}, "--compress names int7, which is no way"),
    ({"compress": ("bf16", "bf16")}, "--compress names bf16 twice"),
]


def job(fewer: tuple[str, ...] = (), **more: Any) -> Job:
    found: tuple[Fewer, ...] = fewer_in(fewer)
    return Job(global_batch=8, fewer=found, **more)


@pytest.mark.parametrize(("wishes", "words"), EXCLUDED)
def test_what_excludes_each_other_is_refused_in_a_job_and_in_a_request(wishes: dict[str, Any], words: str):
    with pytest.raises(UsageError, match=words):
        job(**wishes)
    with pytest.raises(UsageError, match=words):
        Request(fleet=ONE, run_dir="runs", **wishes)


def test_a_larger_batch_may_be_summed_in_one_ring():
    assert job(sums="ring", fewer=("accumulate:4",)).fewer[0].every == 4


def test_the_ways_to_compress_are_named():
    with pytest.raises(UsageError) as told:
        job(compress=("int7",))
    assert "powersgd4" in told.value.render()


def test_parts_below_0_are_refused():
    with pytest.raises(UsageError, match="--parts has lab/a=-1"):
        Request(fleet=ONE, run_dir="runs", state="optimizer", parts={"lab/a": -1})


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"global_batch": 10**20}, "--batch is 100000000000000000000\n.*work: 1 to 4194304: samples"),
        ({"micro_batch": 9}, "--micro-batch is 9\n.*work: 1 to 8: samples at once"),
        ({"memory_margin": 2}, "--memory-margin is 2\n.*work: 0 to 0.99: the part .* that stays free"),
        ({"memory_margin": float("nan")}, "--memory-margin is nan\n.*work: 0 to 0.99"),
        ({"max_step_s": 0}, "--max-step is 0\n.*work: a number above 0"),
        ({"max_price_per_hour": float("inf")}, "--max-price is inf\n.*work: a number above 0"),
        ({"allow": ("everything",)}, "--allow names everything, .*\n.*work: tensor-parallel or unlinked"),
        ({"batch_per_device": {"lab/a": 9, "lab/b": -1}}, "--batch-per-device of lab/b is -1\n.*work: 0 to"),
        ({"batch_per_device": {"lab/a": 9}}, "sums to 9, not to .* 8\n.*work: leave --batch out"),
    ],
)
def test_a_number_out_of_range_is_refused_with_its_range(wishes: dict[str, Any], words: str) -> None:
    """Each told of the batch and of splits, also a margin of 2."""
    with pytest.raises(UsageError, match=words):
        Job(**{"global_batch": 8, **wishes})
