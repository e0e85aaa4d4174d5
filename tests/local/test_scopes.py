"""Pooled BatchNorm and dropout by keys: random plans have a plain loop's gradients and running statistics."""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from evener.core.fleet import Device, Fleet
from evener.core.order import epoch_order, global_batch_at, resized
from evener.core.plan import Plan, Stage
from evener.errors import ScheduleError
from evener.runtime.batchnorm import replace_batchnorm
from evener.runtime.dropout import dropout_keys, replace_dropout
from evener.runtime.ranks import Ranks
from evener.session.exactness.reference import merged_waves, micro_batches
from evener.session.layout.lay_out import lay_out
from evener.session.layout.seat import Seat
from evener.session.loop.steps import Steps
from evener.session.meeting import Meeting
from evener.session.recipe import Recipe
from evener.session.site import open_site
from tests.local.plans import plan_of, stage
from tests.local.pool import Pool

LAYERS = ("enter", "first", "second", "third", "head")
A, B, C = NAMES = ("h/a", "h/b", "h/c")
SEED = 3


class Block(nn.Module):
    """Convolution and BatchNorm beside a short cut, then dropout of channels and of values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.channels, self.drop = nn.Dropout2d(0.2), nn.Dropout(0.2)

        self.full = 0  # so many samples are too many

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == self.full:
            raise torch.OutOfMemoryError("full")
        return self.drop(x + self.channels(torch.tanh(self.norm(self.conv(x)))))


class Net(nn.Module):
    """A small residual convolutional net over (samples, 2, 4, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3))
        self.first, self.second, self.third = Block(), Block(), Block()
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.third(self.second(self.first(self.enter(x)))))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan, and how many samples there are: two epochs are run.

    The second device has no memory for `full` samples in the layer "second"; `then` is the plan after that.
    Of `masked` labels only a third count.
    """

    plan: Plan
    dataset_size: int
    full: int = 0
    then: Plan | None = None
    masked: bool = False


def valid(batch: Any) -> float:
    return float((batch[1] >= 0).sum())


def recipe_of(case: Case) -> Recipe:
    torch.manual_seed(SEED)
    x = torch.randn(case.dataset_size, 2, 4, 4, dtype=torch.float64)
    y = torch.randint(0, 3, (case.dataset_size,))
    if case.masked:
        y[torch.rand(len(y)) > 0.3] = -100
    return Recipe(
        model=Net().double().train(),
        dataset=list(zip(x, y, strict=True)),
        loss=cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        global_batch=case.plan.global_batch,
        weight=valid if case.masked else None,
        batch_norm="wave",
        dropout="split-free",
    )


def whole(device: str, micro_batch: int, *, recompute: bool = False) -> tuple[Stage, ...]:
    return (stage(" ".join(LAYERS), (device, micro_batch), recompute=recompute),)


def train(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, Any]]:
    """By case: the gradients of every step and the buffers at the end that this process holds."""
    store = _store(rank)
    fleet = Fleet(devices=tuple(Device(name=n, kind="cpu", threads=1) for n in NAMES[:world_size]))
    site = open_site(fleet.devices[rank], rehearse=False)
    ranks = Ranks(NAMES[:world_size], NAMES[rank])
    found = []
    for number, case in enumerate(cases):
        recipe = recipe_of(case)
        replace_dropout(recipe.model, SEED)
        replace_batchnorm(recipe.model)
        recipe.model.second.full = case.full if rank == 1 else 0
        meeting = Meeting(dist.PrefixStore(f"case{number}", store), rank, world_size)
        seat = Seat(
            recipe=recipe, plan=case.plan, ranks=ranks, site=site, fleet=fleet, meeting=meeting, seed=SEED
        )
        layout = lay_out(seat)
        steps = Steps(seat, layout)
        seen: list[dict[str, torch.Tensor]] = []
        steps.optimizer.register_step_pre_hook(
            lambda *_, held=layout.parameters, seen=seen: seen.append(
                {n: p.grad.clone() for n, p in held.items() if p.grad is not None}
            )
        )
        for _ in steps.run(2 * case.dataset_size):
            pass
        steps.average_buffers(layout.holding.wire)
        assert steps.plan.pipelines == (case.then or case.plan).pipelines
        held = {n: b.clone() for n, b in recipe.model.named_buffers() if rank_holds(layout, ranks, n)}
        steps.close()
        found.append({"gradients": seen, "buffers": held})
        dist.barrier()  # a channel that closes early would look like a lost peer
    return found


def rank_holds(layout: Any, ranks: Ranks, name: str) -> bool:
    return ranks.here in layout.holders[name]


def _store(rank: int) -> dist.Store:
    where: list[Any] = [None]
    if rank == 0:
        ours = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        where = [ours.port]
    dist.broadcast_object_list(where)
    return ours if rank == 0 else dist.TCPStore("127.0.0.1", where[0], is_master=False)


def plain(case: Case) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """The same steps on one device, each wave merged into one micro-batch of torch's own BatchNorm."""
    recipe = recipe_of(case)
    model, size, seen = recipe.model, case.dataset_size, 0
    replace_dropout(model, SEED)
    optimizer = recipe.optimizer(model.parameters())
    steps = []
    while seen < 2 * size:
        batch = global_batch_at(seen, size, recipe.global_batch)
        order = epoch_order(size, batch.epoch, SEED)[batch.start : batch.stop]
        optimizer.zero_grad()
        weight = 0.0
        for places in merged_waves(micro_batches(resized(case.then or case.plan, batch.samples))):
            x, y = recipe.collate_fn([recipe.dataset[order[i]] for i in places])
            with dropout_keys(model, len(steps), places):
                loss = cross_entropy(model(x), y, reduction="sum")
            loss.backward()
            weight += valid((x, y))
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad / weight
        steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        seen += batch.samples
    return steps, dict(model.named_buffers())


def check(pool: Pool, world_size: int, cases: list[Case]) -> None:
    by_rank = pool.run(train, world_size, cases, timeout_s=100.0)
    for case, held in zip(cases, zip(*by_rank, strict=True), strict=True):
        steps, buffers = plain(case)
        for own in held:
            assert len(own["gradients"]) == len(steps)
            for found, wanted in zip(own["gradients"], steps, strict=True):
                assert distance(found, wanted) <= 1e-12, case
            assert distance(own["buffers"], buffers) <= 1e-12, case
        assert {n for own in held for n in own["gradients"][0]} == set(steps[0]), case
        assert {n for own in held for n in own["buffers"]} == set(buffers), case


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """‖found - wanted‖ / ‖wanted‖ over the names that were found."""
    off = sum(float((t.double() - wanted[n].double()).square().sum()) for n, t in found.items())
    norm = sum(float(wanted[n].double().square().sum()) for n in found)
    return (off / norm) ** 0.5 if norm else 0.0  # a device may hold no buffer


def test_data_parallel_with_other_numbers_of_micro_batches(pool: Pool) -> None:
    """6 and 2 samples; then 5 and 3 in as many waves, but for a smaller batch that the first has less of."""
    check(
        pool,
        2,
        [
            Case(plan=plan_of((6, whole(A, 2)), (2, whole(B, 1))), dataset_size=11),
            Case(plan=plan_of((6, whole(A, 4, recompute=True)), (2, whole(B, 2))), dataset_size=8),
            Case(plan=plan_of((5, whole(A, 2)), (3, whole(B, 1))), dataset_size=15),
        ],
    )


def test_pipelines_and_hybrids(pool: Pool) -> None:
    two = (stage("enter first", (A, 2)), stage("second third head", (B, 2), recompute=True))
    again = (stage("enter", (A, 2)), stage("first second", (B, 2)), stage("third head", (A, 2)))
    shared = (stage("enter first", (A, 3)), stage("second third head", (A, 1), (B, 2)))
    check(
        pool,
        3,
        [
            Case(plan=plan_of((5, two), (4, whole(C, 1))), dataset_size=13),
            Case(plan=plan_of((5, again), (3, whole(C, 2))), dataset_size=8),
            Case(plan=plan_of((7, shared), (2, whole(C, 1))), dataset_size=14),
        ],
    )
    check(
        pool,
        2,
        [
            Case(plan=plan_of((5, two), schedule=schedule), dataset_size=8)
            for schedule in ("1f1b", "gpipe", "zero-bubble")
        ],
    )


def test_samples_without_weight_count_in_the_statistics(pool: Pool) -> None:
    """Micro-batches in which no label counts have their part in the waves, and gradients through them."""
    two = (stage("enter first", (A, 2)), stage("second third", (B, 2)), stage("head", (A, 2)))
    check(pool, 2, [Case(plan=plan_of((6, whole(A, 2)), (4, whole(B, 1))), dataset_size=13, masked=True)])
    check(pool, 3, [Case(plan=plan_of((4, two), (4, whole(C, 1))), dataset_size=13, masked=True)])


def random_plan(rng: random.Random, devices: tuple[str, ...]) -> Plan:
    """Pipelines over devices of their own, each cut at random."""
    names, pipelines = rng.sample(devices, len(devices)), []
    while names:
        count = rng.randint(1, len(names))
        mine, names = names[:count], names[count:]
        micro_batch = rng.randint(2, 4)
        cuts = sorted(rng.sample(range(1, len(LAYERS)), count - 1))
        stages = tuple(
            stage(" ".join(LAYERS[low:high]), (device, micro_batch), recompute=rng.random() < 0.3)
            for device, low, high in zip(mine, [0, *cuts], [*cuts, len(LAYERS)], strict=True)
        )
        pipelines.append((rng.randint(1, 9), stages))
    return plan_of(*pipelines)


@pytest.mark.parametrize("world_size", [2, 3])
def test_random_splits(pool: Pool, world_size: int) -> None:
    rng = random.Random(world_size)
    plans = [random_plan(rng, NAMES[:world_size]) for _ in range(6)]
    check(pool, world_size, [Case(plan=p, dataset_size=p.global_batch + rng.randint(0, 5)) for p in plans])


def test_no_memory_in_the_middle_of_a_wave_leaves_no_trace(pool: Pool) -> None:
    """The second device is full between layers that meet: all redo the step, statistics included."""
    halved = plan_of((6, whole(A, 2)), (4, whole(B, 1)))
    two = (stage("enter first", (A, 2)), stage("second third head", (B, 2)))
    one = (stage("enter first", (A, 1)), stage("second third head", (B, 1)))
    check(
        pool,
        2,
        [Case(plan=plan_of((6, whole(A, 2)), (4, whole(B, 2))), dataset_size=13, full=2, then=halved)],
    )
    check(
        pool,
        3,
        [
            Case(
                plan=plan_of((4, two), (5, whole(C, 2))),
                dataset_size=13,
                full=2,
                then=plan_of((4, one), (5, whole(C, 2))),
            )
        ],
    )


def test_a_wrong_statistic_or_mask_is_found() -> None:
    """What `distance` says of a plain loop in which the waves, or the samples' positions, are others."""
    case = Case(plan=plan_of((6, whole(A, 2)), (2, whole(B, 1))), dataset_size=8)
    other = Case(plan=plan_of((6, whole(A, 3)), (2, whole(B, 1))), dataset_size=8)
    steps, buffers = plain(case)
    assert distance(*(x[0][0] for x in (plain(other), plain(case)))) > 1e-3
    assert distance(plain(other)[1], buffers) > 1e-3
    assert distance(plain(replace(case, dataset_size=8))[0][0], steps[0]) == 0.0


def deadlocks(rank: int, world_size: int, plan: Plan) -> str:
    """What a device is told that cannot run `plan`."""
    with pytest.raises(ScheduleError) as caught:
        train(rank, world_size, [Case(plan=plan, dataset_size=9)])
    dist.barrier()  # the store is the first one's
    return str(caught.value)


def test_a_schedule_that_cannot_meet_is_refused_before_the_first_step(pool: Pool) -> None:
    two = (stage("enter first", (A, 2)), stage("second third head", (B, 2)))
    first, second = pool.run(deadlocks, 3, plan_of((5, two), (4, whole(C, 1)), schedule="1f1b"))[:2]
    assert first == second
    assert "the schedule 1f1b cannot pool BatchNorm over waves" in first and "h/a at 0F" in first
    assert 'the schedule "gpipe" in the plan' in first
    halves = pool.run(deadlocks, 3, plan_of((5, two), (4, whole(C, 1)), schedule="zero-bubble"))[0]
    assert "half of one" in halves
    twice = pool.run(deadlocks, 2, plan_of((4, two), (4, whole(A, 2))))[0]
    assert "each device in one pipeline" in twice
