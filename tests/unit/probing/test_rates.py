import pytest
import torch

from evener.probing import rates

CPU = torch.device("cpu")


def measured(monkeypatch, seconds_per_flop):
    """Matrix measurements on a device whose products take the given seconds a FLOP by dtype."""
    now = [0.0]

    def product(device, dtype, n):
        per_flop = seconds_per_flop[str(dtype).removeprefix("torch.")]
        if isinstance(per_flop, Exception):
            raise per_flop

        def call():
            now[0] += per_flop * 2 * n**3

        return call

    monkeypatch.setattr(rates, "_product", product)
    return rates.matrix_measurements(CPU, "cpu", clock=lambda: now[0], slot_s=1e-3)


def test_a_useless_half_precision_is_left_out_and_said(monkeypatch):
    found, notes = measured(
        monkeypatch,
        {"float64": 20e-12, "float32": 10e-12, "bfloat16": 5e-12, "float16": 850e-12},
    )
    assert list(found) == ["float64", "float32", "bfloat16"]
    (note,) = notes
    assert note.startswith("cpu: float16 left out, 85x slower than float32")
    for name, seconds_per_flop in (("float64", 20e-12), ("float32", 10e-12), ("bfloat16", 5e-12)):
        assert found[name].work / found[name].task.sample() == pytest.approx(1 / seconds_per_flop)


def test_double_precision_stays_however_slow(monkeypatch):
    found, notes = measured(
        monkeypatch, {"float64": 640e-12, "float32": 10e-12, "bfloat16": 5e-12, "float16": 5e-12}
    )
    assert list(found) == ["float64", "float32", "bfloat16", "float16"]
    assert notes == []
    assert found["float64"].note == "256x256 matrices"  # smaller ones, so that a call stays short


def test_a_dtype_without_a_kernel_is_left_out_and_said(monkeypatch):
    error = TypeError("no float64 here\nsecond line")
    found, notes = measured(
        monkeypatch, {"float64": error, "float32": 1e-12, "bfloat16": 1e-12, "float16": 1e-12}
    )
    assert "float64" not in found
    assert notes == ["cpu: float64 left out, torch raises no float64 here"]


def test_bandwidth_and_launch_of_this_cpu_are_plausible():
    import time

    bandwidth = rates.bandwidth_measurement(CPU, "cpu", clock=time.perf_counter, slot_s=0.0)
    assert 1e8 < bandwidth.work / bandwidth.task.sample() < 1e13
    assert 1e-8 < rates.launch_task(CPU, "cpu", clock=time.perf_counter, slot_s=0.0).sample() < 1e-3
