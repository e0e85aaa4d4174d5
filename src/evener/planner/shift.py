"""Last touches on a plan of few stages: move cuts, swap, merge or drop devices, move samples, while that
helps.
"""

import itertools
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.cost.evaluate import evaluate
from evener.planner.aim import Aim
from evener.planner.blocks import Tables
from evener.planner.residences import in_memory, on_hosts

FEW_STAGES = 24
MOST_MEMBERS = 3
Run = tuple[tuple[str, ...], tuple[str, ...]]
"""Layers and the devices that run them."""

_MOST_STEPS = 60


def shifted(tables: Tables, plan: Plan, aim: Aim) -> Plan:
    """`plan` improved until no neighbour is better; plans of more than `FEW_STAGES` stages as they are."""
    if sum(len(p.stages) for p in plan.pipelines) > FEW_STAGES:
        return plan
    best = aim.value(evaluate(tables.model, plan).step_s, plan.devices)
    for _ in range(_MOST_STEPS):
        for changed in _neighbours(tables, in_memory(plan)):
            other = on_hosts(tables.model, changed)
            if other is None:
                continue
            value = aim.value(evaluate(tables.model, other).step_s, other.devices)
            if value < best * (1 - 1e-9):
                plan, best = other, value
                break
        else:
            break
    return plan


def _neighbours(tables: Tables, plan: Plan) -> Iterator[Plan]:
    for p, pipeline in enumerate(plan.pipelines):
        for changed in _changed(tables, pipeline):
            yield replace(plan, pipelines=(*plan.pipelines[:p], changed, *plan.pipelines[p + 1 :]))
    for p, giver in enumerate(plan.pipelines):
        for q, taker in enumerate(plan.pipelines):
            step = min(giver.micro_batch, giver.samples - 1)
            if p != q and step > 0:
                pipelines = list(plan.pipelines)
                pipelines[p] = replace(giver, samples=giver.samples - step)
                pipelines[q] = replace(taker, samples=taker.samples + step)
                yield replace(plan, pipelines=tuple(pipelines))


def _changed(tables: Tables, pipeline: Pipeline) -> Iterator[Pipeline]:
    """Cuts moved by a layer; neighbouring stages swapped, given to one of the two, or shared; a shared
    stage cut in two; another micro-batch. Devices of a stage are in any order: `_fitting` gives them their
    samples.
    """
    size = pipeline.micro_batch
    runs = [(s.layers, tuple(x.devices[0] for x in s.shares)) for s in pipeline.stages]
    for other in sorted({size - 1, size + 1, size // 2, size * 2} - {0, size}):
        yield from _fitting(tables, pipeline, runs, other)
    for s, ((a, on_a), (b, on_b)) in enumerate(itertools.pairwise(runs)):
        pairs = [
            [(a + b[:1], on_a), (b[1:], on_b)],
            [(a[:-1], on_a), (a[-1:] + b, on_b)],
            [(a, on_b), (b, on_a)],
            [(a + b, on_a)],
            [(a + b, on_b)],
            [(a + b, on_a + on_b)],
        ]
        for pair in pairs:
            if all(layers for layers, _ in pair):
                yield from _fitting(tables, pipeline, [*runs[:s], *pair, *runs[s + 2 :]], size)
    yield from _told_otherwise(tables, pipeline)
    for s, (layers, on) in enumerate(runs):
        half = len(layers) // 2
        for k, name in enumerate(on if len(on) > 1 and half else ()):
            rest = on[:k] + on[k + 1 :]
            for two in (
                [(layers[:half], (name,)), (layers[half:], rest)],
                [(layers[:half], rest), (layers[half:], (name,))],
            ):
                yield from _fitting(tables, pipeline, [*runs[:s], *two, *runs[s + 1 :]], size)


def _told_otherwise(tables: Tables, pipeline: Pipeline) -> Iterator[Pipeline]:
    """One stage recomputed or not, kept on the host or not, as memory allows."""
    index = {x.name: i for i, x in enumerate(tables.model.profile.layers)}
    group_of = {n: g for g, group in enumerate(tables.groups) for n in group.names}
    for s, stage in enumerate(pipeline.stages):
        if any(x.devices[0] not in group_of for x in stage.shares):
            continue
        shares = sorted(stage.shares, key=lambda x: group_of[x.devices[0]])
        block = tuple(group_of[x.devices[0]] for x in shares)
        parts = tuple(x.samples for x in shares)
        i, j = index[stage.layers[0]], index[stage.layers[-1]] + 1
        for told in tables.ways_that_fit(block, parts, len(pipeline.stages) - s, i, j):
            other = replace(stage, **told)
            if other != stage and len(stage.layers) == j - i:
                yield replace(pipeline, stages=(*pipeline.stages[:s], other, *pipeline.stages[s + 1 :]))


def _fitting(tables: Tables, pipeline: Pipeline, runs: Sequence[Run], size: int) -> Iterator[Pipeline]:
    """The pipeline over these runs of layers where memory allows it, with the best splits and
    recomputation.
    """
    index = {x.name: i for i, x in enumerate(tables.model.profile.layers)}
    group_of = {n: g for g, group in enumerate(tables.groups) for n in group.names}
    made = []
    for s, (layers, names) in enumerate(runs):
        if len(names) > min(MOST_MEMBERS, size):
            return
        ordered = sorted(names, key=lambda n: group_of[n])
        table = tables.stage(tuple(group_of[n] for n in ordered), size, len(runs) - s)
        i, j = index[layers[0]], index[layers[-1]] + 1
        if not table.work_s[i, j] < float("inf"):
            return
        parts = table.splits[table.split[i, j]]
        shares = tuple(
            Share(devices=tables.devices_of(n), samples=k) for n, k in zip(ordered, parts, strict=True)
        )
        made.append(Stage(layers=layers, shares=shares, **table.choices(i, j)))
    yield replace(pipeline, micro_batch=size, stages=tuple(made))
