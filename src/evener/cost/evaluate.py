"""What a whole plan takes: pipelines played out under 1F1B, then the gradient reduction behind them.

Where a device runs several stages, the plan's own schedule is played instead: it says in which order.

This is the one judge of plans: whatever a search believes, its result is evaluated here.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from evener.core.plan import Pipeline, Plan, Stage
from evener.core.split import apportion
from evener.cost.communication import shares_send_s
from evener.cost.exchange import sums_of
from evener.cost.memory import stage_memory
from evener.cost.model import CostModel
from evener.cost.owned import play_owned
from evener.cost.owned_played import play_in_stages
from evener.cost.pipeline import StageTimes, held_at_both_ends, one_f_one_b
from evener.cost.reduce import Holder, Sums, reduction_ends
from evener.cost.resident_memory import resident_peak
from evener.cost.residing import resident
from evener.cost.several import play, run_several
from evener.cost.step import MODEL_ERROR


@dataclass(frozen=True, kw_only=True)
class PipelineCost:
    """Seconds and bytes of one pipeline by stage and share; `ends_s` is when a stage's last backward ends.

    `exposed_s` is what computing waits for the host, in all micro-batches and at the step's begin: part of
    `compute_s` and of what `start_s` has as overhead.
    """

    spans: tuple[tuple[int, int], ...]
    times: tuple[StageTimes, ...]
    ends_s: tuple[float, ...]
    holders: tuple[Holder, ...]
    memory_bytes: dict[str, float]
    compute_s: dict[str, float]
    start_s: dict[str, tuple[float, float]]
    own_end_s: dict[str, float]
    exposed_s: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def end_s(self) -> float:
        return max(self.ends_s)


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """A plan's seconds a step, the causes by device (they add up to it), and peak bytes by device."""

    step_s: float
    compute_end_s: float
    seconds: dict[str, dict[str, float]]
    memory_bytes: dict[str, float]


def bounds_of(model: CostModel, plan: Plan, step_s: float) -> tuple[float, float]:
    """Least and most seconds a step, around `step_s`: figures at their edges, and `MODEL_ERROR` beyond.

    Example: a step of 100 ms, all of it of figures of ±10 %: 88.2 and 112.2 ms.
    """
    edges = []
    for side in (-1, 1):
        edge = CostModel(fleet=model.fleet, profile=model.profile, side=side)
        edges.append(evaluate(edge, plan).step_s * (1 + side * MODEL_ERROR))
    return min(edges[0], step_s), max(edges[1], step_s)


def evaluate(model: CostModel, plan: Plan) -> PlanCost:
    """Price `plan`. Errors of the tables (unknown kind, missing layer, far outside) pass through.

    Each device updates its parameters, computes, and meets the others in the reduction: one round of the
    steady state. A layer held by several shares is summed over them in buckets, see `reduction_ends`. Where
    owners keep state in parts, see `play_owned`, and `play_in_stages` for plans that cut the model.
    """
    if plan.owners:
        told = play_owned(model, plan) if plan.is_data_parallel else play_in_stages(model, plan)
        return PlanCost(
            step_s=told.step_s,
            compute_end_s=told.compute_end_s,
            seconds=told.seconds,
            memory_bytes=told.memory_bytes,
        )
    if run_several(plan.pipelines):
        costs = _together(model, plan)
    else:
        costs = [pipeline_cost(model, p) for p in plan.pipelines]
    compute_end = max(c.end_s for c in costs)
    step = step_seconds(model, costs, sums_of(model.network, plan))
    seconds: dict[str, dict[str, float]] = {}
    for cost in costs:
        for name, compute in cost.compute_s.items():
            update, overhead = cost.start_s[name]
            idle = max(cost.own_end_s[name] - compute - update - overhead, 0.0)
            seconds[name] = {
                "compute": compute,
                "bubble": idle,
                "optimizer": update,
                "overhead": overhead,
                "wait": compute_end - cost.own_end_s[name],
                "reduce": step - compute_end,
            }
            if name in cost.exposed_s:
                often, first = cost.exposed_s[name]
                seconds[name]["compute"] -= often
                seconds[name]["overhead"] -= first
                seconds[name]["transfer"] = often + first
    memory = {name: b for c in costs for name, b in c.memory_bytes.items()}
    return PlanCost(step_s=step, compute_end_s=compute_end, seconds=seconds, memory_bytes=memory)


def step_seconds(model: CostModel, costs: Sequence[PipelineCost], sum_s: Sums | None = None) -> float:
    """Seconds a step of these pipelines side by side: the last of them, or the reduction behind it."""
    holders = [h for c in costs for h in c.holders]
    return max(max(c.end_s for c in costs), reduction_ends(model.network, model.bytes, holders, sum_s))


def pipeline_cost(model: CostModel, pipeline: Pipeline) -> PipelineCost:
    """Price one pipeline alone."""
    if pipeline not in model._pipelines:
        if run_several([pipeline]):
            alone = Plan(global_batch=pipeline.samples, pipelines=(pipeline,), schedule="1f1b")
            (model._pipelines[pipeline],) = _together(model, alone)
        else:
            model._pipelines[pipeline] = _apart(model, pipeline)
    return model._pipelines[pipeline]


def _together(model: CostModel, plan: Plan) -> list[PipelineCost]:
    """The pipelines of a plan in which devices run several stages; by device all of its stages count."""
    played, numbers, costs = play(model, plan), itertools.count(), []
    for pipeline in plan.pipelines:
        apart = _apart(model, pipeline)
        stages = zip(pipeline.stages, numbers, strict=False)
        shares = [(number, x.devices) for stage, number in stages for x in stage.shares]
        ends = [max(played.ends_s.get((k, d), 0.0) for d in devices) for k, devices in shares]
        last = dict.fromkeys((k for k, _ in shares), 0.0)
        for (k, _), end_s in zip(shares, ends, strict=True):
            last[k] = max(last[k], end_s)
        costs.append(
            replace(
                apart,
                ends_s=tuple(last.values()),
                holders=tuple(replace(h, end_s=e) for h, e in zip(apart.holders, ends, strict=True)),
                memory_bytes={d: played.memory_bytes[d] for d in pipeline.devices},
                compute_s={d: played.compute_s[d] for d in pipeline.devices},
                start_s={d: played.start_s[d] for d in pipeline.devices},
                own_end_s={d: played.end_s(d) for d in pipeline.devices},
            )
        )
    return costs


def _apart(model: CostModel, pipeline: Pipeline) -> PipelineCost:
    """A pipeline whose stages have devices of their own."""
    sizes = pipeline.micro_batch_sizes or (0,)  # without samples it still holds layers and takes part in sums
    spans = tuple(model.span(s) for s in pipeline.stages)
    full = [_stage(model, s, span, sizes[0]) for s, span in zip(pipeline.stages, spans, strict=True)]
    last = [_stage(model, s, span, sizes[-1]) for s, span in zip(pipeline.stages, spans, strict=True)]
    sends = [_sends(model, pipeline.stages, spans, size) for size in (sizes[0], sizes[-1])]
    starts = [_starts(model, s, span, sizes[-1]) for s, span in zip(pipeline.stages, spans, strict=True)]
    times = tuple(
        StageTimes(
            forward_s=max(f for f, _ in full[k]),
            backward_s=max(b for _, b in full[k]),
            send_s=sends[0][k],
            last_forward_s=max(f for f, _ in last[k]),
            last_backward_s=max(b for _, b in last[k]),
            last_send_s=sends[1][k],
            start_s=max(u + o for u, o in starts[k].values()),
        )
        for k in range(len(spans))
    )
    ends = one_f_one_b(held_at_both_ends(times) if model.trainer.blocking_sends else times, len(sizes))
    holders, memory, compute, own_end = [], {}, {}, {}
    exposed: dict[str, tuple[float, float]] = {}
    for k, (stage, span) in enumerate(zip(pipeline.stages, spans, strict=True)):
        in_flight = min(len(spans) - k, len(sizes))
        parts = apportion(sizes[-1], [s.samples for s in stage.shares])
        for which, share in enumerate(stage.shares):
            kind = model.fleet.device(share.devices[0]).kind
            layers = model.layers(kind, len(share.devices))
            backward = layers.seconds(parts[which])[1] if parts[which] else np.zeros(model.bytes.num_layers)
            degree = len(share.devices)
            holders.append(
                Holder(
                    device=share.devices[0],
                    span=span,
                    end_s=ends[k],
                    backward_s=backward,
                    degree=degree,
                    part_bytes=model.bytes_at(degree).summed if degree > 1 else None,
                )
            )
            for name in share.devices:
                own_end[name] = ends[k]
                memory[name] = _bytes(model, stage, span, share.samples, in_flight, kind, degree)
                work = [full[k][which], last[k][which]]
                if stage.residence:
                    told = resident(model, stage, name, share.samples)
                    exposed[name] = len(sizes) * told.exposed_s, told.first_s
                elif rows_s := model.rows_s(name, span, parts[which]):
                    exposed[name] = 0.0, rows_s
                compute[name] = (len(sizes) - 1) * sum(work[0]) + sum(work[1])
    return PipelineCost(
        spans=spans,
        times=times,
        ends_s=tuple(ends),
        holders=tuple(holders),
        memory_bytes=memory,
        compute_s=compute,
        start_s={n: v for row in starts for n, v in row.items()},
        own_end_s=own_end,
        exposed_s=exposed,
    )


def _stage(model: CostModel, stage: Stage, span: tuple[int, int], size: int) -> list[tuple[float, float]]:
    """(forward, backward) seconds of each share for a micro-batch of `size` samples."""
    rows = []
    first, last = span
    for share, samples in zip(stage.shares, apportion(size, [s.samples for s in stage.shares]), strict=True):
        if not samples:
            rows.append((0.0, 0.0))
            continue
        kind = model.fleet.device(share.devices[0]).kind
        forward, backward = model.layers(kind, len(share.devices)).seconds(samples)
        f, b = float(forward[first:last].sum()), float(backward[first:last].sum())
        step = model.step(kind) if first == 0 else None
        waits = float(step.input_s[min(samples, step.largest)]) if step else 0.0
        if stage.residence:
            told = resident(model, stage, share.devices[0], samples)
            rows.append((told.forward_s + waits, told.backward_s))
            continue
        rows.append((f + waits, b + f if stage.recompute else b))
    return rows


def _sends(
    model: CostModel, stages: Sequence[Stage], spans: Sequence[tuple[int, int]], size: int
) -> list[float]:
    """Seconds from each stage to the next for a micro-batch of `size` samples; 0 after the last."""
    cut = [
        list(zip((s.devices for s in x.shares), apportion(size, [s.samples for s in x.shares]), strict=True))
        for x in stages
    ]
    return [
        shares_send_s(model.network, cut[k], cut[k + 1], float(model.bytes.output[spans[k][1] - 1]))
        for k in range(len(stages) - 1)
    ] + [0.0]


def _starts(
    model: CostModel, stage: Stage, span: tuple[int, int], last_size: int
) -> dict[str, tuple[float, float]]:
    """(update, fixed overhead) seconds of each device of a stage."""
    found = {}
    parts = apportion(last_size, [s.samples for s in stage.shares])
    for share, samples in zip(stage.shares, parts, strict=True):
        for name in share.devices:
            kind = model.fleet.device(name).kind
            update = float(model.layers(kind, len(share.devices)).update_s[span[0] : span[1]].sum())
            step = model.step(kind)
            if step and len(share.devices) == 1 and span == (0, model.bytes.num_layers):
                update = step.update_s
            fixed = (step.overhead_s if step else 0.0) + model.trainer.step_s
            if stage.residence:
                told = resident(model, stage, name, share.samples)
                update, fixed = told.update_s, fixed + told.first_s
            else:
                fixed += model.rows_s(name, span, samples)
            found[name] = (update, fixed)
    return found


def _bytes(
    model: CostModel,
    stage: Stage,
    span: tuple[int, int],
    samples: int,
    in_flight: int,
    kind: str,
    degree: int,
) -> float:
    if stage.residence:
        return resident_peak(
            model.bytes,
            list(model.places),
            span,
            samples,
            in_flight,
            stage.residence,
            recompute=stage.recompute,
        )
    step = model.step(kind) if span == (0, model.bytes.num_layers) and degree == 1 else None
    if step and step.peak_bytes.any() and samples <= step.largest and not stage.recompute:
        return float(step.peak_bytes[samples])
    return stage_memory(
        model.bytes_at(degree), *span, samples=samples, in_flight=in_flight, recompute=stage.recompute
    ).total
