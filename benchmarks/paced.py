"""The rivals on the devices of a fleet file, paced as a rehearsal paces them: DDP, and each device alone.

DDP sums its gradients inside backward, as always. A device then waits, on its own clock, for the last one to
have ended its backward. The sum itself takes no time: kinder to DDP than the fleet file is to evener.
"""

from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import run_processes, say
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from evener.core.fleet import Device, Fleet
from evener.core.plan import micro_batch_sizes
from evener.rehearsal.driver import PacedDriver, open_driver
from evener.rehearsal.verdict import Lateness, verdict
from evener.runtime.problem import shapes_of
from evener.session.recipe import Recipe, load_recipe

WARM_UP = 3  # an action is counted in its first step, the optimiser's in its first two


class PacedLoop:
    """A plain training loop whose forward, backward and update run as actions of one paced device."""

    def __init__(self, recipe: Recipe, model: torch.nn.Module, driver: PacedDriver) -> None:
        self.recipe, self.model, self.driver = recipe, model, driver
        self.optimizer = recipe.optimizer(list(model.parameters()))

    def micro_batch(self, batch: Any) -> None:
        """Forward and backward of (inputs, target)."""
        x, y = batch
        signature = shapes_of(batch)
        loss = self.driver.run("0F0", lambda: self.recipe.loss(self.model(x), y), signature=signature)
        self.driver.run("0B0", loss.backward, signature=signature)

    def update(self) -> None:
        """The optimiser's step."""
        self.driver.run("STEP", self.optimizer.step)
        self.optimizer.zero_grad()


def ddp_step_s(script: str, fleet: Fleet, global_batch: int, steps: int) -> tuple[float, bool]:
    """Seconds of a DDP step with an even split of `global_batch`, one micro-batch a device: the median, and
    whether the devices kept their clocks.
    """
    results = run_processes(_ddp, len(fleet.devices), script, fleet.devices, global_batch, steps)
    held, sentence = verdict([lateness for _, lateness in results])
    say(f"DDP: {sentence}")
    return median(results[0][0]), held


def _ddp(
    rank: int, world_size: int, script: str, devices: tuple[Device, ...], global_batch: int, steps: int
) -> tuple[list[float], Lateness]:
    recipe = load_recipe(script, seed=0)
    driver = open_driver(devices[rank])
    loop = PacedLoop(recipe, DistributedDataParallel(recipe.model), driver)
    batches = _batches(recipe, rank, world_size, global_batch // world_size)
    seconds = []
    for _ in range(WARM_UP + steps):
        start = driver.now()
        loop.micro_batch(next(batches))
        last_end = torch.tensor(driver.now(), dtype=torch.float64)
        dist.all_reduce(last_end, dist.ReduceOp.MAX)
        driver.advance(float(last_end))
        loop.update()
        seconds.append(driver.now() - start)
    return seconds[WARM_UP:], driver.lateness()


def _batches(recipe: Recipe, rank: int, world_size: int, samples: int) -> Iterator[Any]:
    sampler = DistributedSampler(recipe.dataset, world_size, rank)
    loader = DataLoader(recipe.dataset, batch_size=samples, sampler=sampler, drop_last=True)
    while True:
        yield from loader


def solo_samples_per_s(
    script: str, fleet: Fleet, global_batch: int, candidates: tuple[int, ...], steps: int
) -> dict[str, float]:
    """Samples per second of each device alone with the whole global batch, in the best of its micro-batches.

    The devices run at the same time and do not meet: each is paced by its own clock.
    """
    rates = run_processes(
        _solo, len(fleet.devices), script, fleet.devices, global_batch, candidates, steps, timeout_s=600
    )
    return {d.name: rate for d, rate in zip(fleet.devices, rates, strict=True)}


def _solo(
    rank: int,
    world_size: int,
    script: str,
    devices: tuple[Device, ...],
    global_batch: int,
    candidates: tuple[int, ...],
    steps: int,
) -> float:
    recipe = load_recipe(script, seed=0)
    driver = open_driver(devices[rank])
    loop = PacedLoop(recipe, recipe.model, driver)

    def seconds_of(size: int) -> float:
        start = driver.now()
        loop.micro_batch(recipe.batch_of(size))
        return driver.now() - start

    for _ in range(WARM_UP):
        seconds_of(1)
        loop.update()
    rates = {}
    for size in candidates:
        seconds_of(size)  # counted, not timed
        rates[size] = size / seconds_of(size)
    sizes = micro_batch_sizes(global_batch, max(rates, key=lambda size: rates[size]))
    if sizes[-1] != sizes[0]:
        seconds_of(sizes[-1])
    loop.update()
    seconds = []
    for _ in range(steps):
        start = driver.now()
        for size in sizes:
            seconds_of(size)
        loop.update()
        seconds.append(driver.now() - start)
    return global_batch / median(seconds)
