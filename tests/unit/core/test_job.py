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
        ({"global_batch": 10**20}, "at most 4194304, got 1e[+]20"),
        ({"global_batch": 8, "micro_batch": 9}, "micro_batch 9 is more than the global batch has, 8"),
    ],
)
def test_a_job_is_no_larger_than_can_be_planned(wishes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Job(**wishes)
