import pytest
import torch

from evener.core.figures import Figure
from evener.core.fleet import Device, Rehearsed
from evener.errors import UsageError
from evener.rehearsal.device.roofline import Roofline

aten = torch.ops.aten


def roofline(factors: dict[str, float] | None = None) -> Roofline:
    def figure(value: float) -> Figure:
        return Figure(value=value, source="assumed")

    return Roofline(
        Device(
            name="a/x",
            kind="k",
            flops={"float32": figure(1e12), "bfloat16": figure(4e12)},
            bytes_per_s=figure(1e11),
            launch_s=figure(1e-5),
            rehearsed=Rehearsed(factors=factors or {}),
        )
    )


def seconds(line: Roofline, func, *args: torch.Tensor) -> float:
    return line.seconds(func, args, {}, func(*args))


def test_a_large_product_is_bound_by_its_flops():
    x = torch.ones(1000, 1000)
    assert seconds(roofline(), aten.mm.default, x, x) == pytest.approx(2e9 / 1e12 + 1e-5)
    assert seconds(roofline(), aten.mm.default, x.bfloat16(), x.bfloat16()) == pytest.approx(
        2e9 / 4e12 + 1e-5
    )


def test_a_thin_product_is_bound_by_its_bytes():
    x, y = torch.ones(1, 1000), torch.ones(1000, 1000)
    assert seconds(roofline(), aten.mm.default, x, y) == pytest.approx(4 * 1_002_000 / 1e11 + 1e-5)


def test_elementwise_work_reads_and_writes():
    x = torch.ones(1_000_000)
    assert seconds(roofline(), aten.add.Tensor, x, x) == pytest.approx(12e6 / 1e11 + 1e-5)


def test_looking_rows_up_does_not_read_the_table():
    table, rows = torch.ones(100_000, 10), torch.tensor([1, 2])
    assert seconds(roofline(), aten.embedding.default, table, rows) == pytest.approx(176 / 1e11 + 1e-5)


def test_hidden_factors_hold_by_family():
    x = torch.ones(1000, 1000)
    line = roofline({"matmul": 0.5, "other": 0.25})
    assert seconds(line, aten.mm.default, x, x) == pytest.approx(4e-3 + 1e-5)
    assert seconds(line, aten.add.Tensor, x, x) == pytest.approx(12e6 / 0.25e11 + 1e-5)


def test_a_dtype_without_a_rate_is_refused():
    x = torch.ones(2, 2, dtype=torch.float64)
    with pytest.raises(UsageError, match="cannot compute in float64"):
        seconds(roofline(), aten.mm.default, x, x)
