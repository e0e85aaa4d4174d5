"""Stealing in a run: who may, the tickets of every step, and the data of what was taken.

A device's own micro-batches come from its loader. What it takes from others it reads itself; where the loader
has workers, a thread reads ahead what it is likely to take next: the last waiting one of the device it last
helped.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from evener.core.order import GlobalBatch
from evener.core.plan import Plan
from evener.core.routes import Routes
from evener.core.words import counted
from evener.errors import UsageError
from evener.runtime.batchnorm import wave_layers
from evener.runtime.executor import StepResult
from evener.runtime.stealing import Draw, Lot, lots_of
from evener.session.loop.feed import Feed, Samples
from evener.session.loop.unfinished import check_counted
from evener.session.recipe import Recipe, dropout_names

ORDER = (
    "stealing: which device sums which micro-batch depends on how fast each was, so that the last bits of a "
    "sum differ from run to run"
)
STATISTICS = (
    "stealing: BatchNorm's running statistics take in a micro-batch on the device that ran it, weighted as "
    "if each had run its own"
)
MASKS = "stealing: a micro-batch gets the dropout masks of the device that ran it, so runs do not repeat"


def stolen_parts(recipe: Recipe) -> tuple[str, ...]:
    """Sentences on what depends on who ran a micro-batch."""
    modules = list(recipe.model.modules())
    found = [ORDER]
    if any(isinstance(m, _BatchNorm) for m in modules):
        found.append(STATISTICS)
    if recipe.dropout == "per-device" and any(getattr(m, n) for m in modules for n in dropout_names(m)):
        found.append(MASKS)
    return tuple(found)


def check_stealing(plan: Plan, model: nn.Module, tables: tuple[str, ...]) -> None:
    """UsageError unless micro-batches of `plan` can be run by any of its devices."""
    if not plan.is_data_parallel:
        raise UsageError(
            "stealing is for data-parallel plans: a stage of a pipeline holds layers that others do not have",
            numbers=f"{counted(len(plan.pipelines), 'pipeline')} of "
            f"{', '.join(str(len(p.stages)) for p in plan.pipelines)} stages",
            remedy="leave out --steal (steal in the recipe or the plan), or --shapes data-parallel",
        )
    if wave_layers(model):
        raise UsageError(
            'stealing and batch_norm="wave" exclude each other: a micro-batch would change its wave',
            remedy='batch_norm="local", or no stealing',
        )
    if tables:
        raise UsageError(
            f"stealing does not go with tables in parts over devices ({', '.join(tables)})",
            remedy="leave out --steal",
        )


class Stealing:
    """The tickets of a run on one device. `store` must be this group's alone: a new group, a new room."""

    def __init__(self, store: dist.Store, samples: Samples, here: str, now: Callable[[], float]) -> None:
        self._store, self._samples, self._here, self._now = store, samples, here, now
        self._tries = 0
        self._reader = ThreadPoolExecutor(1) if samples.workers else None
        self._ahead: dict[tuple[int, int, int], Future] = {}
        self._helped = ""
        self._moved: dict[str, int] = {}
        self._seen = 0

    def begin(self, plan: Plan, routes: Routes) -> Draw:
        """The draw of the next step, or of another try at one; called by all devices alike."""
        key, old = f"step{self._tries + 1}", f"step{self._tries}"
        for name in ("taken", "back") if self._tries else ():
            self._store.delete_key(f"{old}/{self._here}/{name}")  # all are past it: they have summed since
        self._tries += 1
        planned = plan.samples_by_device()
        told = plan.prediction.seconds if plan.prediction else {}
        paces = {d: told[d].get("compute", 0.0) / planned[d] for d in told if planned.get(d)}
        return Draw(lots_of(routes, paces), self._here, self._store, key, self._now)

    def fetch(self, draw: Draw, feed: Feed, batch: GlobalBatch) -> Callable[[int, int], Any]:
        """Gives the samples of each micro-batch of `draw`, own or taken."""
        self._ahead.clear()
        lots = {lot.device: lot for lot in draw.others}
        if self._helped in lots:
            self._read_ahead(batch, lots[self._helped], lots[self._helped].num_waiting - 1)

        def read(stage: int, micro_batch: int) -> Any:
            taken = draw.taken(micro_batch)
            if taken is None:
                if micro_batch == len(draw.mine.sizes) - 1:
                    feed.skip(draw.num_lost)
                return feed.next_batch()
            lot, number = taken
            self._helped = lot.device
            part = lot.range_of(number)
            waiting = self._ahead.pop((batch.epoch, batch.start, part[0]), None)
            data = waiting.result() if waiting else self._load(batch, part)
            self._read_ahead(batch, lot, number - 1)
            return data

        return read

    def after_step(self, plan: Plan, result: StepResult) -> None:
        """Check that every sample was run once, and count who ran more than it was given."""
        check_counted(result)
        ran = result.totals.samples
        if result.samples == plan.global_batch:
            self._seen += result.samples
            for device, given in plan.samples_by_device().items():
                self._moved[device] = self._moved.get(device, 0) + ran[device] - given

    def summary(self) -> list[str]:
        """The sentence on what was taken in all, where anything was."""
        more = {device: n for device, n in self._moved.items() if n}
        told = ", ".join(f"{device} {n:+d}" for device, n in more.items())
        return [f"stealing: samples run beyond those given, of {self._seen}: {told}"] if more else []

    def close(self) -> None:
        if self._reader:
            self._reader.shutdown(wait=False, cancel_futures=True)

    def _load(self, batch: GlobalBatch, part: tuple[int, int]) -> Any:
        if self._reader is None:
            return self._samples.load(batch, part)
        return self._reader.submit(self._samples.load, batch, part).result()  # one thread uses the dataset

    def _read_ahead(self, batch: GlobalBatch, lot: Lot, number: int) -> None:
        if self._reader and number >= 0:
            part = lot.range_of(number)
            key = (batch.epoch, batch.start, part[0])
            self._ahead[key] = self._reader.submit(self._samples.load, batch, part)
