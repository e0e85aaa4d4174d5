"""Micro-batches drawn by ticket in real processes: the gradients of a plain loop, whoever ran what."""

import time
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.routes import Routes
from evener.runtime.hardware import HardwareDriver
from evener.runtime.stealing import Draw, lots_of
from tests.local.pool import Pool
from tests.local.test_exact_steps import check
from tests.local.training import Case, Device, DeviceRun, attempt_of, global_batches, plain

SAMPLES, MICRO_BATCH = (12, 7, 5), (2, 2, 1)


class SlowNowAndThen:
    """A driver whose forwards take 20 ms on one device, a step each, and 1 ms on the others."""

    def __init__(self, rank: int) -> None:
        self._inner, self._rank, self.step = HardwareDriver(torch.device("cpu")), rank, 0

    def now(self) -> float:
        return self._inner.now()

    def run(self, action: str, work: Callable[[], Any], *, signature: Hashable = ()) -> Any:
        if "F" in action:
            time.sleep(0.02 if self.step % len(SAMPLES) == self._rank else 0.001)
        return self._inner.run(action, work, signature=signature)


def plan() -> Plan:
    pipelines = tuple(
        Pipeline(
            samples=n,
            micro_batch=m,
            stages=(Stage(layers=("all",), shares=(Share(devices=(f"test/{d}",), samples=m),)),),
        )
        for d, (n, m) in enumerate(zip(SAMPLES, MICRO_BATCH, strict=True))
    )
    return Plan(global_batch=sum(SAMPLES), pipelines=pipelines, steal=True)


def train_on(rank: int, world_size: int, case: Case) -> tuple[DeviceRun, int, list[int]]:
    """The run, how many micro-batches this device took from others, and the samples it ran."""
    driver = SlowNowAndThen(rank)
    device = Device(rank, world_size, case, stage=rank, driver=driver)
    store = dist.PrefixStore("tickets", dist.distributed_c10d._get_default_store())
    run, taken, ran = DeviceRun(), 0, []
    lots = lots_of(Routes(plan()), {f"test/{d}": 0.001 for d in range(world_size)})
    for number, batch in enumerate(global_batches(case)):
        driver.step = number
        draw = Draw(lots, f"test/{rank}", store, str(number), driver.now)
        seen: list = []
        device.recorder = seen.append

        def fetch(stage: int, micro_batch: int, draw: Draw = draw, batch: Any = batch) -> Any:
            first, stop = draw.range_of(stage, micro_batch)
            ran.extend(range(first, stop))
            return tuple(t[first:stop] for t in batch)

        result = device.executor.step(number, draw.row(), draw, fetch, len(batch[0]))
        run.tries.append(attempt_of(result, seen, device.model))
        taken += draw.num_taken
    run.parameters = [p.detach().clone() for p in device.model.parameters()]
    device.executor.close()
    return run, taken, ran


@pytest.mark.parametrize("masked", [(), (1, 2, 13, 20, 23)], ids=["mean", "masked"])
def test_a_step_with_stolen_micro_batches_has_the_gradients_of_a_plain_loop(pool: Pool, masked) -> None:
    steps = 6
    case = Case(
        micro_batches=tuple((n,) for n in SAMPLES),
        steps=steps,
        dtype=torch.float64,
        masked=masked,
        reduction="sum" if masked else "mean",
    )
    results = pool.run(train_on, len(SAMPLES), case)
    check([run for run, _, _ in results], plain(case), torch.float64)
    assert sum(taken for _, taken, _ in results) >= steps, "one device is 20 times slower in each step"

    everything = sorted(i for _, _, ran in results for i in ran)
    assert everything == sorted(list(range(sum(SAMPLES))) * steps)
