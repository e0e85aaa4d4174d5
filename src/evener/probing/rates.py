"""How fast one device computes: matrix products by dtype, memory bandwidth, cost of a tiny operation."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from evener.core.figures import Figure
from evener.probing.rounds import Clock, Task, fastest

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
HALF = ("bfloat16", "float16")
LEAST_GAIN = 1 / 8
"""A half-precision type slower than this part of float32 is left out: its smaller size cannot make up."""
SCREEN_SIZE = 128
MATRIX_SIZE = {"cpu": 512, "accelerator": 4096}
LONGEST_CALL_S = 0.05
COPIED_BYTES = {"cpu": 2**26, "accelerator": 2**28}
TINY_OPERATIONS = 100


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A task and the work behind its seconds: rate = `work` / seconds."""

    task: Task
    work: float
    note: str = ""


def matrix_measurements(
    device: torch.device, name: str, *, clock: Clock, slot_s: float
) -> tuple[dict[str, Measurement], list[str]]:
    """A measurement for each usable dtype, and a sentence for each dtype that is left out and why.

    One product of n x n matrices is 2 n^3 FLOP; n is 512 on a CPU and 4096 on an accelerator, halved until
    a call stays below 50 ms. Example: n = 512 in 0.9 ms is 0.3 TFLOP/s.
    """
    screened, notes = _screen(device, name, clock, slot_s)
    measurements = {}
    for dtype_name, rate in screened.items():
        full = screened.get("float32", rate)
        if dtype_name in HALF and rate < LEAST_GAIN * full:
            notes.append(
                f"{name}: {dtype_name} left out, {full / rate:.0f}x slower than float32 in matrix products "
                f"({rate / 1e9:.3g} against {full / 1e9:.3g} GFLOP/s)"
            )
            continue
        n = MATRIX_SIZE["cpu" if device.type == "cpu" else "accelerator"]
        while n > SCREEN_SIZE and 2 * n**3 / rate > LONGEST_CALL_S:
            n //= 2
        call = _product(device, DTYPES[dtype_name], n)
        measurements[dtype_name] = Measurement(
            task=_task(f"{dtype_name} {name}", call, clock, slot_s), work=2.0 * n**3, note=f"{n}x{n} matrices"
        )
    return measurements, notes


def _screen(
    device: torch.device, name: str, clock: Clock, slot_s: float
) -> tuple[dict[str, float], list[str]]:
    """A rough rate for each dtype that runs at all, from short calls of one thread: a busy machine disturbs
    those least, and a dtype must not be lost to a neighbour.
    """
    rates, notes = {}, []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for dtype_name, dtype in DTYPES.items():
            try:
                product = _product(device, dtype, SCREEN_SIZE)
                seconds = fastest(product, clock=clock, slot_s=slot_s, least=5)
            except (RuntimeError, TypeError) as e:  # torch has no kernel, or the device no such type
                notes.append(f"{name}: {dtype_name} left out, torch raises {str(e).splitlines()[0]}")
            else:
                rates[dtype_name] = 2 * SCREEN_SIZE**3 / seconds
    finally:
        torch.set_num_threads(threads)
    return rates, notes


def product_rate(device: torch.device, dtype: torch.dtype, *, clock: Clock, slot_s: float) -> float:
    """FLOP/s of a matrix product in `dtype`, from few calls: whether a type is fast, not how fast exactly.

    As for `matrix_measurements`, 2 n^3 FLOP with n halved until a call stays below 50 ms. Raises what torch
    raises where the device or the build lacks the type.
    """
    rate = 2 * SCREEN_SIZE**3 / fastest(_product(device, dtype, SCREEN_SIZE), clock=clock, slot_s=slot_s)
    n = MATRIX_SIZE["cpu" if device.type == "cpu" else "accelerator"]
    while n > SCREEN_SIZE and 2 * n**3 / rate > LONGEST_CALL_S:
        n //= 2
    return 2 * n**3 / fastest(_product(device, dtype, n), clock=clock, slot_s=slot_s)


def bandwidth_measurement(device: torch.device, name: str, *, clock: Clock, slot_s: float) -> Measurement:
    """Memory bandwidth: a copy of B bytes moves 2 B (read, write). Example: 64 MiB in 10 ms is 13.4 GB/s."""
    num_bytes = COPIED_BYTES["cpu" if device.type == "cpu" else "accelerator"]
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.zeros(num_bytes // 4, device=device)

    def call() -> None:
        target.copy_(source)
        _finish(device)

    return Measurement(task=_task(f"memory {name}", call, clock, slot_s), work=2.0 * num_bytes)


def rows_rate() -> Figure:
    """Bytes/s of rows at random in this host's memory, one thread: what lookups of a table get.

    16,384 rows of 256 bytes out of 64 MiB move 2 · 4 MiB (read, write). Example: in 1.5 ms 5.6 GB/s.
    """
    table = torch.ones(COPIED_BYTES["cpu"] // 256, 64)
    ids = torch.randint(0, len(table), (16_384,), generator=torch.Generator().manual_seed(0))
    seconds = fastest(lambda: table.index_select(0, ids), clock=time.perf_counter, slot_s=0.02)
    return Figure(value=2 * len(ids) * 256 / seconds, source="measured", note="rows of a table at random")


def launch_task(device: torch.device, name: str, *, clock: Clock, slot_s: float) -> Task:
    """Seconds of one operation on one number, as the mean of 100 in a row."""
    number = torch.zeros(1, device=device)

    def call() -> None:
        for _ in range(TINY_OPERATIONS):
            number.add_(1.0)
        _finish(device)

    def sample() -> float:
        return fastest(call, clock=clock, slot_s=slot_s) / TINY_OPERATIONS

    return Task(name=f"tiny operation {name}", sample=sample)


def _product(device: torch.device, dtype: torch.dtype, n: int) -> Callable[[], None]:
    a = torch.rand(n, n, device=device, dtype=dtype)
    b = torch.rand(n, n, device=device, dtype=dtype)
    out = torch.empty(n, n, device=device, dtype=dtype)

    def call() -> None:
        torch.mm(a, b, out=out)
        _finish(device)

    return call


def _task(name: str, call: Callable[[], None], clock: Clock, slot_s: float) -> Task:
    return Task(name=name, sample=lambda: fastest(call, clock=clock, slot_s=slot_s))


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
