"""A second opinion: torch.distributed.pipelining gives the same for the same stages and micro-batches.

It wants equal micro-batches, one pipeline and a device for each stage. It also refuses skips over a stage,
loses ties of weights, and what crosses must lie in one piece in memory: an LSTM's output does not.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline
from torch.utils.data import default_collate

from benchmarks.shape_instances import BOUND, Instance, names_of, plain, recipe_of, run_instances
from benchmarks.shape_models import Loss
from evener.core.order import epoch_order
from evener.core.plan import Pipeline, Plan, Share, Stage
from tests.local.pool import Pool
from tests.reference import relative_error

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Layers by stage, one stage a device, and `count` micro-batches of `size` samples."""

    family: str
    stages: tuple[str, ...]
    count: int
    size: int
    schedule: str
    dtype: str = "float64"

    @property
    def instance(self) -> Instance:
        stages = tuple(
            Stage(layers=tuple(row.split()), shares=(Share(devices=(d,), samples=self.size),))
            for row, d in zip(self.stages, names_of(len(self.stages)), strict=True)
        )
        whole = self.count * self.size
        pipe = Pipeline(samples=whole, micro_batch=self.size, stages=stages)
        plan = Plan(global_batch=whole, pipelines=(pipe,), schedule=self.schedule)
        return Instance(family=self.family, plan=plan, dataset_size=whole + 1, seed=3, dtype=self.dtype)


def torchs(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, torch.Tensor]]:
    """By case, the gradients of this process's stage under torch's own pipelining."""
    found = []
    for case in cases:
        recipe = recipe_of(case.instance)
        data, order = recipe.dataset, epoch_order(len(recipe.dataset), 0, 3)
        x, y = default_collate([data[int(i)] for i in order[: recipe.global_batch]])
        begins = {row.split()[0]: SplitPoint.BEGINNING for row in case.stages[1:]}
        pipe = pipeline(recipe.model, mb_args=(x[: case.size],), split_spec=begins)
        stage = pipe.build_stage(rank, torch.device("cpu"), dist.group.WORLD)
        schedule = SCHEDULES[case.schedule](stage, case.count, loss_fn=Loss("mean"))
        ends = {"args": (x,) if rank == 0 else (), "target": y if rank == world_size - 1 else None}
        schedule.step(*ends["args"], target=ends["target"])
        found.append({n: p.grad for n, p in stage.submod.named_parameters() if p.grad is not None})
        dist.barrier()
    return found


TWO = {
    "sequential": ("0 1 2", "3 4 5 6 7"),
    "residual": ("0 1 2 3", "4 5 6 7"),
    "unet": ("enter down", "deep up out"),
    "encoder-decoder": ("embed encoder.0 encoder.1", "decoder.0 decoder.1 decoder.2 head"),
}
FOUR = {"sequential": ("0", "1 2", "3 4 5 6", "7"), "residual": ("0", "1 2", "3 4", "5 6 7")}


@pytest.mark.parametrize("cuts", [TWO, FOUR], ids=["two stages", "four stages"])
def test_the_same_gradients(pool: Pool, cuts: dict[str, tuple[str, ...]]) -> None:
    world_size = len(cuts["sequential"])
    shape = {"count": world_size + 1, "size": 2}
    cases = [
        Case(family=family, stages=stages, schedule=schedule, **shape)
        for schedule in SCHEDULES
        for family, stages in cuts.items()
    ]
    cases.append(
        Case(family="sequential", stages=cuts["sequential"], schedule="1f1b", dtype="float32", **shape)
    )
    ours = pool.run(run_instances, world_size, [case.instance for case in cases])
    theirs = pool.run(torchs, world_size, cases)
    for number, case in enumerate(cases):
        bound, wanted, met = BOUND[case.dtype], plain(case.instance)[0], set()
        for rank in range(world_size):
            mine, other = ours[rank][number][0], theirs[rank][number]
            assert set(mine) == set(other), case
            assert relative_error(list(mine.values()), [other[n] for n in mine]) <= bound, case
            assert relative_error(list(mine.values()), [wanted[n] for n in mine]) <= bound, case
            met |= set(mine)
        assert met == set(wanted), case
