"""Last touches on a plan of few stages: move cuts, swap or drop devices, move samples, while that helps."""

from collections.abc import Iterator

from msgspec.structs import replace

from evener.core.plan import Pipeline, Plan, Stage
from evener.cost.evaluate import evaluate
from evener.planner.aim import Aim
from evener.planner.blocks import Tables

FEW_STAGES = 24
_MOST_STEPS = 60


def shifted(tables: Tables, plan: Plan, aim: Aim) -> Plan:
    """`plan` improved until no neighbour is better; plans of more than `FEW_STAGES` stages as they are."""
    if sum(len(p.stages) for p in plan.pipelines) > FEW_STAGES:
        return plan
    best = aim.value(evaluate(tables.model, plan).step_s, plan.devices)
    for _ in range(_MOST_STEPS):
        for other in _neighbours(tables, plan):
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
    """Cuts moved by one layer, neighbours in the order swapped, one stage given to its neighbour."""
    stages = pipeline.stages
    for s in range(len(stages) - 1):
        a, b = stages[s], stages[s + 1]
        drafts = [
            (a.layers + b.layers[:1], b.layers[1:], a, b),
            (a.layers[:-1], a.layers[-1:] + b.layers, a, b),
            (a.layers, b.layers, b, a),
        ]
        for first, second, left, right in drafts:
            if first and second:
                pair = (replace(left, layers=first), replace(right, layers=second))
                yield from _fitting(tables, pipeline, (*stages[:s], *pair, *stages[s + 2 :]))
        for kept in (a, b):
            whole = replace(kept, layers=a.layers + b.layers)
            yield from _fitting(tables, pipeline, (*stages[:s], whole, *stages[s + 2 :]))


def _fitting(tables: Tables, pipeline: Pipeline, stages: tuple[Stage, ...]) -> Iterator[Pipeline]:
    """The pipeline over `stages` where memory allows it, with the recomputation it then needs."""
    index = {x.name: i for i, x in enumerate(tables.model.profile.layers)}
    group_of = {n: g for g, group in enumerate(tables.groups) for n in group.names}
    made = []
    for s, stage in enumerate(stages):
        block = tuple(group_of[n] for n in (x.devices[0] for x in stage.shares))
        if len(block) > 1:
            return
        table = tables.stage(block, pipeline.micro_batch, len(stages) - s)
        i, j = index[stage.layers[0]], index[stage.layers[-1]] + 1
        if not table.work_s[i, j] < float("inf"):
            return
        made.append(replace(stage, recompute=bool(table.recompute[i, j])))
    yield replace(pipeline, stages=tuple(made))
