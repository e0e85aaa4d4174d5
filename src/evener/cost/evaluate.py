"""What a whole plan takes: pipelines played out under 1F1B, then the gradient reduction behind them.

This is the one judge of plans: whatever a search believes, its result is evaluated here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from evener.core.fleet import Fleet
from evener.core.plan import Pipeline, Plan, Stage
from evener.core.profile import Profile
from evener.core.split import apportion
from evener.cost.communication import Network, shares_send_s
from evener.cost.exchange import sums_of
from evener.cost.layers import LayerCost, layer_cost
from evener.cost.memory import ModelBytes, model_bytes, stage_memory
from evener.cost.pipeline import StageTimes, held_at_both_ends, one_f_one_b
from evener.cost.reduce import Holder, Sums, reduction_ends
from evener.cost.step import StepCost, step_cost
from evener.cost.trainer import EVENER, Trainer
from evener.errors import OutOfRangeError, UnknownNameError


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Everything needed to price plans of one profile on one fleet; tables are made when first used."""

    fleet: Fleet
    profile: Profile
    side: int = 0
    trainer: Trainer = EVENER
    network: Network = field(init=False)
    bytes: ModelBytes = field(init=False)
    _layers: dict[tuple[str, int], LayerCost] = field(default_factory=dict)
    _steps: dict[str, StepCost | None] = field(default_factory=dict)
    _pipelines: dict[Pipeline, "PipelineCost"] = field(default_factory=dict)
    _bytes: dict[int, ModelBytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "network", Network(fleet=self.fleet))
        object.__setattr__(self, "bytes", self.bytes_at(1))

    def bytes_at(self, tensor_parallel: int) -> ModelBytes:
        """What each device of a group of `tensor_parallel` holds; `bytes` is that of a device alone."""
        if tensor_parallel not in self._bytes:
            self._bytes[tensor_parallel] = model_bytes(
                self.profile, tensor_parallel=tensor_parallel, trainer=self.trainer
            )
        return self._bytes[tensor_parallel]

    def layers(self, kind: str, tensor_parallel: int = 1) -> LayerCost:
        key = (kind, tensor_parallel)
        if key not in self._layers:
            self._layers[key] = layer_cost(
                self.profile, kind, tensor_parallel=tensor_parallel, side=self.side
            )
        return self._layers[key]

    def step(self, kind: str) -> StepCost | None:
        """Whole-model figures of `kind` (overheads, input, peak), None where only layers were measured."""
        if kind not in self._steps:
            try:
                measured = any(s.kind == kind for s in self.profile.steps)
                self._steps[kind] = step_cost(self.profile, kind, self.side) if measured else None
            except (UnknownNameError, OutOfRangeError):
                self._steps[kind] = None
        return self._steps[kind]


@dataclass(frozen=True, kw_only=True)
class PipelineCost:
    """Seconds and bytes of one pipeline by stage and share; `ends_s` is when a stage's last backward ends."""

    spans: tuple[tuple[int, int], ...]
    times: tuple[StageTimes, ...]
    ends_s: tuple[float, ...]
    holders: tuple[Holder, ...]
    memory_bytes: dict[str, float]
    compute_s: dict[str, float]
    start_s: dict[str, tuple[float, float]]
    own_end_s: dict[str, float]

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


def evaluate(model: CostModel, plan: Plan) -> PlanCost:
    """Price `plan`. Errors of the tables (unknown kind, missing layer, far outside) pass through.

    Each device updates its parameters, computes, and meets the others in the reduction: one round of the
    steady state. A layer held by several shares is summed over them in buckets, see `reduction_ends`.
    """
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
    memory = {name: b for c in costs for name, b in c.memory_bytes.items()}
    return PlanCost(step_s=step, compute_end_s=compute_end, seconds=seconds, memory_bytes=memory)


def step_seconds(model: CostModel, costs: Sequence[PipelineCost], sum_s: Sums | None = None) -> float:
    """Seconds a step of these pipelines side by side: the last of them, or the reduction behind it."""
    holders = [h for c in costs for h in c.holders]
    return max(max(c.end_s for c in costs), reduction_ends(model.network, model.bytes, holders, sum_s))


def pipeline_cost(model: CostModel, pipeline: Pipeline) -> PipelineCost:
    """Price one pipeline alone."""
    if pipeline not in model._pipelines:
        model._pipelines[pipeline] = _priced(model, pipeline)
    return model._pipelines[pipeline]


def _priced(model: CostModel, pipeline: Pipeline) -> PipelineCost:
    index = {x.name: i for i, x in enumerate(model.profile.layers)}
    sizes = pipeline.micro_batch_sizes
    spans = tuple((index[s.layers[0]], index[s.layers[-1]] + 1) for s in pipeline.stages)
    full = [_stage(model, s, span, sizes[0]) for s, span in zip(pipeline.stages, spans, strict=True)]
    last = [_stage(model, s, span, sizes[-1]) for s, span in zip(pipeline.stages, spans, strict=True)]
    sends = [_sends(model, pipeline.stages, spans, size) for size in (sizes[0], sizes[-1])]
    starts = [_starts(model, s, span) for s, span in zip(pipeline.stages, spans, strict=True)]
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
    for k, (stage, span) in enumerate(zip(pipeline.stages, spans, strict=True)):
        in_flight = min(len(spans) - k, len(sizes))
        parts = apportion(sizes[-1], [s.samples for s in stage.shares])
        for which, share in enumerate(stage.shares):
            kind = model.fleet.device(share.devices[0]).kind
            layers = model.layers(kind, len(share.devices))
            backward = layers.seconds(parts[which])[1] if parts[which] else np.zeros(len(index))
            degree = len(share.devices)
            holders.append(
                Holder(
                    device=share.devices[0],
                    span=span,
                    end_s=ends[k],
                    backward_s=backward,
                    degree=degree,
                    part_bytes=np.diff(model.bytes_at(degree).gradients) if degree > 1 else None,
                )
            )
            for name in share.devices:
                own_end[name] = ends[k]
                memory[name] = _bytes(model, stage, span, share.samples, in_flight, kind, degree)
                work = [full[k][which], last[k][which]]
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


def _starts(model: CostModel, stage: Stage, span: tuple[int, int]) -> dict[str, tuple[float, float]]:
    """(update, fixed overhead) seconds of each device of a stage."""
    found = {}
    for share in stage.shares:
        for name in share.devices:
            kind = model.fleet.device(name).kind
            update = float(model.layers(kind, len(share.devices)).update_s[span[0] : span[1]].sum())
            step = model.step(kind)
            if step and span == (0, model.bytes.num_layers):
                update = step.update_s
            found[name] = (update, (step.overhead_s if step else 0.0) + model.trainer.step_s)
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
    step = model.step(kind) if span == (0, model.bytes.num_layers) and degree == 1 else None
    if step and step.peak_bytes.any() and samples <= step.largest and not stage.recompute:
        return float(step.peak_bytes[samples])
    return stage_memory(
        model.bytes_at(degree), *span, samples=samples, in_flight=in_flight, recompute=stage.recompute
    ).total
