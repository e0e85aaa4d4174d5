"""Seconds from work, by hand."""

import pytest

from evener.core.figures import Figure
from evener.core.fleet import Device, Rehearsed
from evener.errors import UsageError
from evener.rehearsal.counting import Work
from evener.rehearsal.pace import seconds


def figure(value: float) -> Figure:
    return Figure(value=value, source="assumed")


WORK = Work(flops={("matmul", "float32"): 8e6}, num_ops=10, num_bytes=1000)


def device(**fields) -> Device:
    return Device(name="a/x", kind="k", flops={"float32": figure(8e9)}, **fields)


def test_worked_number() -> None:
    paced = device(launch_s=figure(20e-6), rehearsed=Rehearsed(factors={"matmul": 0.5}))
    assert seconds(WORK, paced) == pytest.approx(2.2e-3)


def test_absent_figures_drop_their_term() -> None:
    assert seconds(WORK, device()) == pytest.approx(1e-3)
    assert seconds(Work(num_ops=5, num_bytes=5), device()) == 0


def test_bytes_of_other_operations() -> None:
    paced = device(bytes_per_s=figure(1e6), rehearsed=Rehearsed(factors={"other": 0.5}))
    assert seconds(WORK, paced) == pytest.approx(1e-3 + 2e-3)


def test_a_dtype_without_a_rate_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="a/x cannot compute in float64"):
        seconds(Work(flops={("matmul", "float64"): 1.0}), device())
