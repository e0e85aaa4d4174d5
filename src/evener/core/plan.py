"""Who does what: pipelines → stages → shares. Every parallelism is a corner of this shape.

    uneven data parallel   several pipelines of one stage
    pipeline               one pipeline of several stages
    hybrid                 several pipelines, each cut its own way
    shared stage           a stage with several shares, split by samples

Stages are numbered through the whole plan: pipeline 0 has stages 0..k-1, pipeline 1 goes on from k.
Those are the numbers that a schedule's actions carry.
"""

from collections.abc import Iterator
from typing import Literal

from evener.core.fewer import Fewer
from evener.core.figures import Source, Value
from evener.core.split import apportion
from evener.core.words import counted

PRECISIONS = ("float32", "bfloat16", "float16")
RESIDENCES = ("host-optimizer", "host")
"""Where a stage's tensors live besides on its device; see `Stage`."""
Held = Literal["optimizer", "gradients", "parameters"]
"""Of what each owner keeps only its part; each includes those before it."""
HELD: tuple[Held, ...] = Held.__args__  # type: ignore[attr-defined]


class Share(Value, frozen=True, kw_only=True):
    """A device (or a tensor-parallel group of equal devices) and its samples of each micro-batch."""

    devices: tuple[str, ...]
    samples: int

    def __post_init__(self) -> None:
        if not self.devices or self.samples < 1:
            raise ValueError("a share needs a device and at least one sample")


class Stage(Value, frozen=True, kw_only=True):
    """Consecutive layers of a pipeline, by name, and the shares that run them.

    `precision` is that of its matrix products (None: the job's own); `recompute` keeps only what enters the
    stage and runs its forward again before the backward. `residence` says what lives in the memory of the
    device's host: nothing (None), the "host-optimizer" (its state, and its step on the host's CPU; parameters
    and gradients are on the device), or with "host" everything but activations: layers come to the device one
    ahead of their use and go again. There recompute works layer by layer: what enters each layer is kept.
    With `state_on_disk` the optimiser's state of such a stage lies in a file of the host's disk.
    """

    layers: tuple[str, ...]
    shares: tuple[Share, ...]
    precision: str | None = None
    recompute: bool = False
    residence: str | None = None
    state_on_disk: bool = False

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a stage needs at least one layer")
        if not self.shares:
            raise ValueError(f"the stage from {self.layers[0]!r} has no device")
        if self.precision not in (None, *PRECISIONS):
            raise ValueError(
                f"the stage from {self.layers[0]!r} has the precision {self.precision!r}, not one of "
                f"{', '.join(PRECISIONS)}"
            )
        if self.residence not in (None, *RESIDENCES):
            raise ValueError(
                f"the stage from {self.layers[0]!r} has the residence {self.residence!r}, not one of "
                f"{', '.join(RESIDENCES)}"
            )
        if self.state_on_disk and self.residence is None:
            raise ValueError(
                f"the stage from {self.layers[0]!r} has state_on_disk, which needs a residence: one of "
                f"{', '.join(RESIDENCES)}"
            )


class Pipeline(Value, frozen=True, kw_only=True):
    """One copy of the model: takes `samples` of each global batch in micro-batches of `micro_batch`.

    The last micro-batch is smaller where `samples` is no multiple: 10 in fours is 4 + 4 + 2. A pipeline
    without samples holds the model and takes part in sums: the last batch of an epoch may be that small.
    """

    samples: int
    micro_batch: int
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if self.samples < 0 or self.micro_batch < 1:
            raise ValueError(f"samples must be 0 or more, micro_batch 1 or more, in {self.devices}")
        if not self.stages:
            raise ValueError("a pipeline needs at least one stage")
        seen: set[str] = set()
        for stage in self.stages:
            again = seen & set(stage.layers)
            if again or len(set(stage.layers)) != len(stage.layers):
                raise ValueError(f"layers are placed twice: {', '.join(sorted(again)) or stage.layers}")
            seen |= set(stage.layers)
            held = sum(share.samples for share in stage.shares)
            if held != self.micro_batch:
                raise ValueError(
                    f"the shares of the stage from {stage.layers[0]!r} take {counted(held, 'sample')} of "
                    f"each micro-batch of {self.micro_batch}"
                )

    @property
    def devices(self) -> tuple[str, ...]:
        """Device names in order of first use."""
        shares = (share for stage in self.stages for share in stage.shares)
        return tuple(dict.fromkeys(name for share in shares for name in share.devices))

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Samples of each micro-batch, in order."""
        return micro_batch_sizes(self.samples, self.micro_batch)


class Reduction(Value, frozen=True, kw_only=True):
    """Devices that sum gradients together, in order: inside groups first, then between them.

    With a `part` they are a lane between groups, one member of each, which carries that part of all values;
    `adds` is the part of these that each of them adds up (equal where empty). `among` are all devices whose
    sum this is a part of, where those are not all of the plan: the holders of some of its layers. See
    `core/exchange.py`.
    """

    devices: tuple[str, ...]
    transport: str
    compression: str | None = None
    reason: str = ""
    part: float | None = None
    adds: dict[str, float] = {}
    among: tuple[str, ...] = ()


class Ownership(Value, frozen=True, kw_only=True):
    """Unequal parts of one layer's state by device, as whole numbers in proportion: 5, 3, 2.

    `held` says of what a device keeps only its part: the "optimizer" state (ZeRO stage 1), the "gradients"
    too (stage 2), the "parameters" too (stage 3). Parts follow memory; samples, which follow speed, are the
    pipelines' own: a device may hold state and take no samples, or the reverse (a part of 0).
    """

    layer: str
    parts: dict[str, int]
    held: Held = "optimizer"

    def __post_init__(self) -> None:
        if any(part < 0 for part in self.parts.values()) or not sum(self.parts.values()):
            raise ValueError(f"the parts of {self.layer!r} must be 0 or more and not all 0, got {self.parts}")


class TablePlacement(Value, frozen=True, kw_only=True):
    """Rows of one embedding table by device, and where: "cpu" (host memory), "device", "tiered", "dense".

    `held_bytes` is what a device's rows take with their optimiser's state; `why` the sentence that decided.
    """

    table: str
    rows: dict[str, int]
    residence: str | None = None
    held_bytes: dict[str, int] = {}
    why: str = ""


class LeftOut(Value, frozen=True, kw_only=True):
    """A device the plan does not use, and the sentence why."""

    device: str
    reason: str


class Prediction(Value, frozen=True, kw_only=True):
    """What the plan should take: seconds a step with bounds, and bytes by device.

    `solo_samples_per_s` is what each device does alone, `solo_seconds` seconds of a sample by cause other
    than compute then; `seconds` is the step by device and cause. A used device that cannot hold the model is
    in `unbounded_samples_per_s` instead: what it would do if its memory sufficed. `useful_samples` is what
    each device's part is worth in samples of the whole model, where a plan cuts it. `factors` are what each
    device was believed to take of its profile's seconds, where that is not 1. `owned_bytes` is what an owner
    keeps of state in parts, see `Ownership`.
    `load_bytes` is what a device holds at most while weights are loaded or a run is taken up.
    """

    step_s: float
    lower_s: float
    upper_s: float
    memory_bytes: dict[str, int] = {}
    solo_samples_per_s: dict[str, float] = {}
    solo_seconds: dict[str, dict[str, float]] = {}
    unbounded_samples_per_s: dict[str, float] = {}
    useful_samples: dict[str, float] = {}
    seconds: dict[str, dict[str, float]] = {}
    factors: dict[str, float] = {}
    load_bytes: dict[str, int] = {}
    owned_bytes: dict[str, int] = {}
    source: Source = "fitted"

    def __post_init__(self) -> None:
        if not 0 < self.step_s < float("inf"):
            raise ValueError(f"the predicted step_s must be positive and finite, got {self.step_s}")
        for field in ("lower_s", "upper_s"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise ValueError(
                    f"the predicted {field} must be 0 or more and finite, got {getattr(self, field)}"
                )
        rounding = 1e-9 * self.step_s  # the seconds of a wait are what other causes leave of the step
        for name, causes in self.seconds.items():
            for cause, seconds in causes.items():
                if not -rounding <= seconds < float("inf"):
                    raise ValueError(f"the predicted seconds of {cause} on {name} are {seconds}")


class Plan(Value, frozen=True, kw_only=True):
    """Pipelines, schedule and everything decided once and used by both halves.

    With `steal`, devices that are done with their part of a step take waiting micro-batches of slower ones;
    the samples of each pipeline are then what its device begins with. `fewer` is how hosts exchange less
    often than once a step; with "accumulate" the global batch is already that many times the user's.
    """

    global_batch: int
    pipelines: tuple[Pipeline, ...]
    schedule: str = "gpipe"
    steal: bool = False
    reductions: tuple[Reduction, ...] = ()
    fewer: Fewer | None = None
    owners: tuple[Ownership, ...] = ()
    tables: tuple[TablePlacement, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    inexact: tuple[str, ...] = ()
    prediction: Prediction | None = None
    why: str = ""
    version: int = 1

    def __post_init__(self) -> None:
        total = sum(p.samples for p in self.pipelines)
        if not self.pipelines or total != self.global_batch:
            raise ValueError(
                f"the pipelines take {counted(total, 'sample')}, the global batch is {self.global_batch}"
            )
        first = {name for stage in self.pipelines[0].stages for name in stage.layers}
        for number, pipeline in enumerate(self.pipelines):
            other = {name for stage in pipeline.stages for name in stage.layers}
            if other != first:
                raise ValueError(
                    f"pipeline {number} holds other layers than pipeline 0: "
                    f"{', '.join(sorted(other ^ first))}"
                )
        both = set(self.devices) & {x.device for x in self.left_out}
        if both:
            raise ValueError(f"used and left out at once: {', '.join(sorted(both))}")
        if self.fewer is not None and self.fewer.how != "delayed" and self.fewer.every is None:
            raise ValueError(f"fewer exchanges by {self.fewer.how}, but not after how many steps")

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of all devices that compute, in order of first use."""
        return tuple(dict.fromkeys(name for p in self.pipelines for name in p.devices))

    @property
    def is_data_parallel(self) -> bool:
        """True when every pipeline is one stage on one device of its own."""
        single = all(len(p.stages) == 1 and len(p.devices) == 1 for p in self.pipelines)
        return single and len(self.devices) == len(self.pipelines)

    def numbered_stages(self) -> Iterator[tuple[int, int, Stage]]:
        """(stage number, pipeline number, stage) through the whole plan."""
        number = 0
        for which, pipeline in enumerate(self.pipelines):
            for stage in pipeline.stages:
                yield number, which, stage
                number += 1

    def samples_by_device(self) -> dict[str, int]:
        """Samples of a global batch that each device takes through at least one stage."""
        taken: dict[str, int] = {}
        for pipeline in self.pipelines:
            most: dict[str, int] = {}
            for stage in pipeline.stages:
                for share, samples in zip(stage.shares, share_samples(stage, pipeline), strict=True):
                    for name in share.devices:
                        most[name] = max(most.get(name, 0), samples)
            for name, samples in most.items():
                taken[name] = taken.get(name, 0) + samples
        return taken


def micro_batch_sizes(samples: int, micro_batch: int) -> tuple[int, ...]:
    """Sizes of the micro-batches that hold `samples`. Example: (10, 4) gives (4, 4, 2)."""
    full, rest = divmod(samples, micro_batch)
    return (micro_batch,) * full + ((rest,) if rest else ())


def share_samples(stage: Stage, pipeline: Pipeline) -> tuple[int, ...]:
    """Samples of a global batch that each share of `stage` takes, summed over micro-batches."""
    weights = [share.samples for share in stage.shares]
    split = [apportion(size, weights) for size in pipeline.micro_batch_sizes]
    return tuple(map(sum, zip(*split, strict=True))) if split else (0,) * len(weights)
