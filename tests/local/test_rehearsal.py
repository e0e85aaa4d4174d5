"""Four gloo processes paced at 8:4:2:2 GFLOP/s: a step takes what its formula says, on the wall clock too."""

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.core.collectives import all_reduce_seconds, ring
from evener.core.figures import Figure, line
from evener.core.fleet import Device, Fleet, Link
from evener.rehearsal.driver import open_driver
from evener.rehearsal.verdict import verdict
from evener.rehearsal.wire import open_wire

WIDTH, LAYERS, STEPS = 512, 4, 16
SAMPLES = {"h/a": 192, "h/b": 96, "h/c": 48, "h/d": 48}
GFLOPS = {"h/a": 8.0, "h/b": 4.0, "h/c": 2.0, "h/d": 2.0}
NUM_MICRO = 2
BYTES_PER_S = 1e9


def figure(value: float) -> Figure:
    return Figure(value=value, source="assumed")


FLEET = Fleet(
    devices=tuple(
        Device(
            name=name,
            kind=f"{rate:g}",
            flops={"float32": figure(rate * 1e9)},
            bytes_per_s=figure(BYTES_PER_S),
        )
        for name, rate in GFLOPS.items()
    ),
    links=(Link(a="h", b="h", curve=line(1e-4, 1e9)),),
)


class _Gloo:
    def all_reduce(self, buffer: torch.Tensor, key: str, *, exact_tail: int = 0) -> Any:
        return dist.all_reduce(buffer, async_op=True)


def run_device(rank: int, store: str, results: Any) -> None:
    """Data-parallel steps: two micro-batches, a reduction a layer in mid-backward, an update."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(SAMPLES))
    device = FLEET.devices[rank]
    driver = open_driver(device)
    wire = open_wire(_Gloo(), driver, FLEET, tuple(SAMPLES))
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    weights = list(model.parameters())
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    x = torch.full((SAMPLES[device.name] // NUM_MICRO, WIDTH), float(rank + 1))
    ones = torch.ones_like(x)
    on_the_way: list[Any] = []
    armed = False

    def ready(weight: torch.Tensor) -> None:
        if armed:
            on_the_way.append(wire.all_reduce(weight.grad, "bucket"))

    for weight in weights:
        weight.register_post_accumulate_grad_hook(ready)

    def update() -> None:
        torch._foreach_zero_([w.grad for w in weights])

    virtual, wall, sums = [], [], []
    for _ in range(STEPS):
        before, wall_before = driver.now(), time.monotonic()
        for micro_batch in range(NUM_MICRO):
            armed = micro_batch == NUM_MICRO - 1
            loss = driver.run(f"0F{micro_batch}", lambda: model(x))
            driver.run(f"0B{micro_batch}", lambda: loss.backward(ones), signature=armed)  # noqa: B023
        while on_the_way:
            on_the_way.pop(0).wait()
        sums.append(float(weights[-1].grad.sum()))
        driver.run("STEP", update)
        virtual.append(driver.now() - before)
        wall.append(time.monotonic() - wall_before)
    dist.barrier()
    dist.destroy_process_group()
    results.put((device.name, virtual[4:], wall[4:], sums, driver.lateness()))


def computed_step_s() -> float:
    """By hand: every device needs the same time, so only the hops and their order are left to work out."""
    product_s = 2 * SAMPLES["h/a"] / NUM_MICRO * WIDTH * WIDTH / (GFLOPS["h/a"] * 1e9)
    # A backward begins with the last layer; all but the first layer need two products. Accumulating a
    # gradient reads it and the new one and writes it; the ones at the start are written.
    weight_bytes = 4 * WIDTH * WIDTH
    accumulate_s = 3 * weight_bytes / BYTES_PER_S
    forward_s = LAYERS * product_s
    backward_s = (2 * LAYERS - 1) * product_s + LAYERS * accumulate_s
    hop_s = all_reduce_seconds(weight_bytes, ring(FLEET, tuple(SAMPLES)))
    start_s = NUM_MICRO * forward_s + (NUM_MICRO - 1) * backward_s
    end_s = 0.0
    for done in range(1, LAYERS + 1):
        products = 2 * done - (done == LAYERS)
        launch_s = start_s + products * product_s + done * accumulate_s
        end_s = max(end_s, launch_s) + hop_s
    update_s = LAYERS * weight_bytes / BYTES_PER_S
    return end_s + update_s


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    results = context.Queue()
    store = str(tmp_path_factory.mktemp("store") / "file")
    processes = [
        context.Process(target=run_device, args=(rank, store, results), daemon=True)
        for rank in range(len(SAMPLES))
    ]
    for process in processes:
        process.start()
    try:
        found = [results.get(timeout=90) for _ in processes]
    finally:
        for process in processes:
            process.join(timeout=5)
            process.kill()
    yield {name: rest for name, *rest in found}


def test_the_devices_clocks_show_the_computed_step(measured: dict[str, tuple]) -> None:
    for name, (virtual, *_) in measured.items():
        assert statistics.median(virtual) == pytest.approx(computed_step_s(), rel=0.002), name


def test_the_wall_clock_agrees_within_two_percent(measured: dict[str, tuple]) -> None:
    holds, why = verdict([rest[-1] for rest in measured.values()])
    if not holds:
        pytest.skip(f"this machine was too busy: {why}")
    for name, (_, wall, *_) in measured.items():
        # The median: after a step that the machine held up, those that catch up are shorter on the wall.
        assert statistics.median(wall) == pytest.approx(computed_step_s(), rel=0.02), name


def test_the_sums_are_real(measured: dict[str, tuple]) -> None:
    sums = [tuple(rest[2]) for rest in measured.values()]
    assert len(set(sums)) == 1 and sums[0][0] != 0


def test_everything_was_counted_once_and_every_launch_was_known(measured: dict[str, tuple]) -> None:
    for *_, lateness in measured.values():
        assert (lateness.counted, lateness.guessed) == (5, 0)
        assert lateness.actions == STEPS * (2 * NUM_MICRO + 1) - 5
