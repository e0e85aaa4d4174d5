"""Seconds and bytes of a model on kinds of devices: what `evener profile` measures."""

from collections.abc import Sequence
from typing import Literal

from evener.core.figures import Figure, Value
from evener.errors import UsageError


class Layer(Value, frozen=True, kw_only=True):
    """The unit of placement: a submodule by its fully qualified name, in chain order.

    Bytes ending in `_per_sample` are multiplied by the samples of a micro-batch. `tied` names the other
    layers that share storage with this one; they count as one parameter with several holders. Where a device
    counts its memory, `saved_bytes` is what a micro-batch keeps whatever its samples, and `work_bytes` and
    `work_bytes_per_sample` what comes and goes beyond all that is saved up to here, while the layer runs.
    `output_kept` says who keeps its output for backward: the layer "itself", one "behind" it, or nobody.
    """

    name: str
    num_params: int
    param_bytes: int
    saved_bytes: int = 0
    work_bytes: int = 0
    work_bytes_per_sample: int = 0
    output_kept: Literal["", "itself", "behind"] = ""
    buffer_bytes: int = 0
    output_bytes_per_sample: int = 0
    saved_bytes_per_sample: int = 0
    flops_per_sample: float = 0.0
    tied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("num_params", "param_bytes", "buffer_bytes", "output_bytes_per_sample"):
            if getattr(self, field) < 0:
                raise ValueError(
                    f"{field} of layer {self.name!r} must be 0 or more, got {getattr(self, field)}"
                )
        if self.saved_bytes_per_sample < 0 or not 0 <= self.flops_per_sample < float("inf"):
            raise ValueError(f"saved bytes and FLOPs of layer {self.name!r} must be 0 or more and finite")


class Timing(Value, frozen=True, kw_only=True):
    """Seconds of one layer on one kind at one micro-batch size (samples) and tensor-parallel degree.

    `update_s` is the optimiser's time for the layer's parameters, once a step. Seconds are absent
    where `fits` is false: the size did not fit the device's memory, which is a result.
    """

    layer: str
    kind: str
    micro_batch: int
    tensor_parallel: int = 1
    fits: bool = True
    forward_s: Figure | None = None
    backward_s: Figure | None = None
    update_s: Figure | None = None


class GroupBytes(Value, frozen=True, kw_only=True):
    """Bytes of one layer on each device of a tensor-parallel group, where they are not an even part.

    A group of 4 holds a little more than a quarter each of what the layer saves: parts of it are repeated.
    An output is whole on each device, but that of a split head is not.
    """

    layer: str
    tensor_parallel: int
    param_bytes: int
    output_bytes_per_sample: int
    saved_bytes_per_sample: int


class StepTiming(Value, frozen=True, kw_only=True):
    """Seconds and peak bytes of the whole model on one kind at one micro-batch size.

    `forward_s` and `backward_s` are per micro-batch, loss included; `input_s` is the time to get one
    micro-batch ready that is not hidden behind the one before; `update_s` is once a step, and so is what the
    host reads of the device beside them, `step_overhead_s`. `rows_s` is how long a step waits, after its last
    backward, for gradients of tables' rows on their way to host memory.
    """

    kind: str
    micro_batch: int
    fits: bool = True
    forward_s: Figure | None = None
    backward_s: Figure | None = None
    update_s: Figure | None = None
    input_s: Figure | None = None
    step_overhead_s: Figure | None = None
    rows_s: Figure | None = None
    peak_bytes: Figure | None = None


class Profile(Value, frozen=True, kw_only=True):
    """One model measured on one or more kinds. Layer order is chain order.

    `gradient_bytes` is what one device sends into the reduction of a step. Where a device counts its memory,
    `update_bytes` is what the optimiser's step takes beyond its state, and `input_bytes_per_sample` what a
    batch takes. `moving_buffers` are those, but for BatchNorm's, that training passes have changed.
    `group_bytes` are used where they name every layer at a degree; elsewhere a group's devices
    hold even parts.
    """

    model: str
    layers: tuple[Layer, ...]
    timings: tuple[Timing, ...] = ()
    steps: tuple[StepTiming, ...] = ()
    group_bytes: tuple[GroupBytes, ...] = ()
    gradient_bytes: int = 0
    state_bytes: int = 0
    update_bytes: int | None = None
    input_bytes_per_sample: int = 0
    moving_buffers: tuple[str, ...] = ()
    dtype: str = "float32"
    note: str = ""
    version: int = 1

    def __post_init__(self) -> None:
        names = [x.name for x in self.layers]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"layer names must be unique, twice: {', '.join(twice)}")
        known = set(names)
        _check_ties(self.layers)
        for timing in self.timings:
            if timing.layer not in known:
                raise ValueError(f"timing names {timing.layer!r}, which is no layer of the profile")
            if timing.micro_batch < 1:
                raise ValueError(f"micro_batch of {timing.layer!r} must be 1 or more")
        for row in self.group_bytes:
            if row.layer not in known:
                raise ValueError(f"group_bytes name {row.layer!r}, which is no layer of the profile")
        for step in self.steps:
            if step.micro_batch < 1:
                raise ValueError(f"micro_batch of a step on {step.kind!r} must be 1 or more")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that have measurements, in order of first appearance."""
        return tuple(dict.fromkeys([s.kind for s in self.steps] + [t.kind for t in self.timings]))


def _check_ties(layers: Sequence[Layer]) -> None:
    """Layers that share storage must say so of each other: one that does not would be summed apart."""
    tied = {x.name: x.tied for x in layers}
    for name, others in tied.items():
        for other in others:
            if other == name:
                raise ValueError(f"layer {name!r} is tied to itself")
            if other not in tied:
                raise ValueError(f"layer {name!r} is tied to {other!r}, which is no layer of the profile")
            if name not in tied[other]:
                raise ValueError(
                    f"layer {name!r} is tied to {other!r}, which names {', '.join(tied[other]) or 'none'}: "
                    "each of tied layers must name all others"
                )


def merge_profiles(profiles: Sequence[Profile]) -> Profile:
    """One profile of a model on all the kinds that `profiles` measured.

    Layers, bytes and FLOPs are the first one's, or those of the first whose device counts memory. Raises
    UsageError when there is none, when they are of different layers, or when two measured the same kind.
    Example: a profile on kind A and one on kind B give one on (A, B).
    """
    if not profiles:
        raise UsageError("there is no profile to merge", remedy="at least one profile")
    first = profiles[0]
    counted = next((p for p in profiles if p.update_bytes is not None), first)
    seen: dict[str, str] = {}
    for profile in profiles:
        if _shape(profile) != _shape(first):
            ours, theirs = {x.name for x in first.layers}, {x.name for x in profile.layers}
            raise UsageError(
                f"the profiles of {first.model!r} and {profile.model!r} are not of one model",
                numbers=f"layers in one only: {', '.join(sorted(ours ^ theirs)) or 'none, but sizes differ'}",
                remedy="profiles of the same model, measured on different kinds",
            )
        for kind in profile.kinds:
            if kind in seen:
                raise UsageError(f"two profiles measured kind {kind!r}", remedy="one profile for each kind")
            seen[kind] = profile.model
    return Profile(
        model=first.model,
        layers=counted.layers,
        timings=tuple(t for p in profiles for t in p.timings),
        steps=tuple(s for p in profiles for s in p.steps),
        group_bytes=first.group_bytes,
        gradient_bytes=first.gradient_bytes,
        state_bytes=first.state_bytes,
        update_bytes=counted.update_bytes,
        input_bytes_per_sample=counted.input_bytes_per_sample,
        moving_buffers=tuple(dict.fromkeys(b for p in profiles for b in p.moving_buffers)),
        dtype=first.dtype,
        note="; ".join(dict.fromkeys(p.note for p in profiles if p.note)),
        version=first.version,
    )


def _shape(profile: Profile) -> tuple:
    return tuple((x.name, x.num_params, x.tied) for x in profile.layers), profile.dtype
