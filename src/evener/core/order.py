"""Which samples come when: functions of samples seen, never of how many devices there are."""

import numpy as np
from msgspec.structs import replace

from evener.core.figures import Value
from evener.core.plan import Pipeline, Plan
from evener.core.routes import Routes
from evener.core.split import apportion, spans_of
from evener.errors import PlanMismatchError


class GlobalBatch(Value, frozen=True, kw_only=True):
    """One optimiser step's samples: positions `start`..`stop` of the order of `epoch`."""

    epoch: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        return self.stop - self.start


def global_batch_at(samples_seen: int, dataset_size: int, global_batch: int) -> GlobalBatch:
    """The global batch that begins after `samples_seen` samples.

    A batch never crosses an epoch: the last one of an epoch is smaller where the size is no multiple.
    Example: 10 samples in fours: global_batch_at(8, 10, 4) is positions 8..10 of epoch 0.
    """
    epoch, start = divmod(samples_seen, dataset_size)
    return GlobalBatch(epoch=epoch, start=start, stop=min(start + global_batch, dataset_size))


def batches_in(samples: int, dataset_size: int, global_batch: int) -> int:
    """Global batches that the first `samples` samples of the order are: each epoch's last one counts whole.

    Example: 10 samples in fours are 3 batches an epoch, so 20 samples are 6 and 24 are 7.
    """
    epochs, rest = divmod(samples, dataset_size)
    return epochs * -(-dataset_size // global_batch) - (-rest // global_batch)


def epoch_order(dataset_size: int, epoch: int, seed: int, *, shuffle: bool = True) -> np.ndarray:
    """Indices of the dataset in the order of `epoch`: a permutation drawn from (seed, epoch)."""
    if not shuffle:
        return np.arange(dataset_size)
    return np.random.default_rng((seed, epoch)).permutation(dataset_size)


def samples_by_pipeline(plan: Plan, samples: int) -> tuple[int, ...]:
    """Samples each pipeline takes of a global batch of `samples`, in the plan's proportion.

    The whole global batch gives the plan's own numbers. Example: shares 6 and 2 of 8; a last batch of
    3 gives (2, 1).
    """
    return apportion(samples, [pipeline.samples for pipeline in plan.pipelines])


def resized(plan: Plan, samples: int) -> Plan:
    """The plan for a global batch of `samples`, in the same proportions; pipelines may get none."""
    if samples == plan.global_batch:
        return plan
    parts = samples_by_pipeline(plan, samples)
    pipelines = tuple(replace(p, samples=n) for p, n in zip(plan.pipelines, parts, strict=True))
    return replace(plan, global_batch=samples, pipelines=pipelines, prediction=None)


def positions(routes: Routes, stage: int, device: str, micro_batch: int) -> tuple[int, int]:
    """Half-open range of the global batch that `device` takes of a micro-batch of `stage`.

    Example: pipelines of 6 (micro-batch 4) and 2 samples: micro-batch 1 of the first is (4, 6), micro-batch 0
    of the second (6, 8).
    """
    route = routes.stages[stage]
    before = sum(p.samples for p in routes.plan.pipelines[: route.pipeline])
    before += sum(route.sizes[:micro_batch])
    shares = route.stage.shares
    split = apportion(route.sizes[micro_batch], [share.samples for share in shares])
    for share, (first, last) in zip(shares, spans_of(split), strict=True):
        if device in share.devices:
            return before + first, before + last
    raise PlanMismatchError(f"{device} has no share of stage {stage}")


def with_micro_batch(pipeline: Pipeline, micro_batch: int) -> Pipeline:
    """The same pipeline in micro-batches of another size, at least one sample for each share of a stage.

    Example: shares 6 and 2 of a micro-batch of 8 take 3 and 1 of one of 4.
    """
    stages = []
    for stage in pipeline.stages:
        more = apportion(micro_batch - len(stage.shares), [share.samples for share in stage.shares])
        shares = zip(stage.shares, more, strict=True)
        stages.append(replace(stage, shares=tuple(replace(share, samples=1 + n) for share, n in shares)))
    return replace(pipeline, micro_batch=micro_batch, stages=tuple(stages))
