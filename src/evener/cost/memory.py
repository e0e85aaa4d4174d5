"""Bytes a device holds while it runs a stage, by what holds them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evener.core.fleet import Device
from evener.core.profile import Layer, Profile
from evener.cost.trainer import EVENER, Trainer


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes by holder at the moment of the peak: the first backward with all micro-batches in flight."""

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    boundary: float
    transient: float
    reduction: float

    @property
    def total(self) -> float:
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.buffers
            + self.activations
            + self.boundary
            + self.transient
            + self.reduction
        )


@dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """Running sums over the chain: entry i is the sum of layers before i.

    `transient` (i × j) is what comes and goes for each sample while one of layers i..j-1 runs backward, and
    `transient_fixed` whatever the samples. `kept` is what a micro-batch keeps whatever its samples, `update`
    what the optimiser takes while it steps. `counted` says that a device counted these, loss and batch among
    them; elsewhere they are 0. `kept_itself` and `kept_behind` (by layer) say whose saved bytes the layer's
    output is part of: its own, or those of one behind it. `input` is what a sample's input takes. `summed` is
    by layer what its gradient has to be summed for, tied layers once, with the first of them; `tied` has by
    its place those of all that share storage with it.
    """

    parameters: np.ndarray
    gradients: np.ndarray
    optimizer: np.ndarray
    buffers: np.ndarray
    saved: np.ndarray
    output: np.ndarray
    transient: np.ndarray
    bucket_bytes: float
    kept: np.ndarray
    transient_fixed: np.ndarray
    update: np.ndarray
    counted: bool
    kept_itself: np.ndarray
    kept_behind: np.ndarray
    input: float
    summed: np.ndarray
    tied: dict[int, tuple[int, ...]]

    @property
    def num_layers(self) -> int:
        return len(self.output)

    def fixed(self, i, j):
        """Bytes of layers i..j-1 whatever the micro-batch, one in flight; arrays broadcast."""
        return self.held(i, j) + self.kept[j] - self.kept[i] + self.transient_fixed[i, j]

    def held(self, i, j):
        """Bytes that layers i..j-1 hold all the time; arrays broadcast.

        Where memory is not counted, as much as two buckets is added for sums on their way.
        """
        held = self.parameters + self.gradients + self.optimizer + self.buffers
        return held[j] - held[i] + self.underway(i, j)

    def underway(self, i, j):
        """Bytes of gradients on their way into the sum: a device that counts memory has them on its host."""
        return (
            0.0 * i
            if self.counted
            else np.minimum(2.0 * self.bucket_bytes, self.gradients[j] - self.gradients[i])
        )

    def per_sample(self, i, j, in_flight: int, *, recompute: bool = False):
        """Bytes of layers i..j-1 for each sample of a micro-batch, with `in_flight` of them held.

        Without recompute every one in flight keeps all it saved; with it each keeps the stage's input, and
        the one whose backward runs has the rest again. What enters and leaves the stage is held twice
        (value, gradient). Where memory is counted, the ends of the model are part of what comes and goes; of
        the ends of a stage that counts which its layers do not save anyway, and once the gradient that is
        given back for what leaves.
        """
        saved = self.saved[j] - self.saved[i]
        first = self.input if self.counted and recompute else 0.0
        entering = np.where(np.asarray(i) > 0, self.output[np.maximum(np.asarray(i) - 1, 0)], first)
        leaving = self.output[np.maximum(np.asarray(j) - 1, 0)]
        acts = in_flight * entering + saved if recompute else in_flight * saved
        if self.counted:
            given_back = np.where(np.asarray(j) < self.num_layers, leaving, 0.0)
            ends = in_flight * self.at_ends(i, j, recompute=recompute) + given_back
            return acts + ends + self.transient[i, j]
        return acts + 2 * (entering + leaving) + self.transient[i, j]

    def at_ends(self, i, j, *, recompute: bool = False):
        """Bytes a sample that a micro-batch in flight holds at the ends of a stage beyond what is saved."""
        first, last = np.maximum(np.asarray(i) - 1, 0), np.maximum(np.asarray(j) - 1, 0)
        entering = np.where((np.asarray(i) > 0) & ~self.kept_behind[first], self.output[first], 0.0)
        own = np.zeros_like(self.kept_itself) if recompute else self.kept_itself
        leaving = np.where((np.asarray(j) < self.num_layers) & ~own[last], self.output[last], 0.0)
        return leaving if recompute else entering + leaving

    def peak(self, i, j, samples: int, in_flight: int, *, recompute: bool = False):
        """The most that a device holds of layers i..j-1: with activations, or while the optimiser steps."""
        more = 0 if recompute else in_flight - 1
        acts = self.fixed(i, j) + more * (self.kept[j] - self.kept[i])
        acts = acts + samples * self.per_sample(i, j, in_flight, recompute=recompute)
        return np.maximum(acts, self.held(i, j) + self.update[j] - self.update[i])


def model_bytes(profile: Profile, *, tensor_parallel: int = 1, trainer: Trainer = EVENER) -> ModelBytes:
    """Running sums of a profile's layers on each device of a group of `tensor_parallel`.

    Gradients and optimiser state go by each layer's share of parameters. A group's devices hold what
    `group_bytes` say, else even parts; all of them hold what crosses the ends of a stage.
    """
    layers = profile.layers
    once = bytes_by_layer(layers)
    whole = max(float(once.sum()), 1.0)
    parameters, saved, output = _held(profile, tensor_parallel)
    own = once / np.array([max(x.param_bytes, 1) for x in layers])
    gradient = profile.gradient_bytes / whole if profile.gradient_bytes else 1.0
    counted = profile.update_bytes is not None
    kept = np.array([float(x.saved_bytes) for x in layers]) / tensor_parallel
    transient = trainer.transient_layers * _largest(saved)
    transient_fixed = np.zeros_like(transient)
    if counted:
        transient = _highest(saved, [x.work_bytes_per_sample / tensor_parallel for x in layers])
        transient_fixed = _highest(kept, [x.work_bytes / tensor_parallel for x in layers])
    return ModelBytes(
        parameters=_sums(parameters),
        gradients=_sums(parameters * gradient),
        optimizer=_sums(parameters * profile.state_bytes / whole),
        buffers=_sums(np.array([float(x.buffer_bytes) for x in layers])),
        saved=_sums(saved),
        output=output,
        transient=transient,
        bucket_bytes=trainer.bucket_bytes,
        kept=_sums(kept),
        transient_fixed=transient_fixed,
        update=_sums(parameters * (profile.update_bytes or 0) / whole),
        counted=counted,
        kept_itself=np.array([x.output_kept == "itself" for x in layers]),
        kept_behind=np.array([x.output_kept == "behind" for x in layers]),
        input=float(profile.input_bytes_per_sample),
        summed=parameters * gradient * own,
        tied=tied_places(layers),
    )


def bytes_by_layer(layers: Sequence[Layer]) -> np.ndarray:
    """Bytes of parameters by layer, those of tied layers once: what gradients and state are kept for.

    Of tied layers the largest counts, and what the others have beyond its bytes. Example: an embedding of 100
    bytes tied to a head of 120 are 100 and 20.
    """
    seen: dict[str, int] = {}
    own = []
    for x in layers:
        shared = max((seen[name] for name in x.tied if name in seen), default=0)
        own.append(float(max(x.param_bytes - shared, 0)))
        seen[x.name] = x.param_bytes
    return np.array(own)


def tied_places(layers: Sequence[Layer]) -> dict[int, tuple[int, ...]]:
    """By place of the first of layers that share storage, the places of all of them.

    Example: an embedding tied to the head behind two blocks: {0: (0, 3)}.
    """
    place = {x.name: i for i, x in enumerate(layers)}
    sets = {tuple(sorted({place[x.name], *(place[name] for name in x.tied)})) for x in layers if x.tied}
    return {places[0]: places for places in sorted(sets)}


def _held(profile: Profile, degree: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(parameters, saved, output) bytes by layer of one device in a group of `degree`."""
    rows = {r.layer: r for r in profile.group_bytes if r.tensor_parallel == degree}
    measured = degree > 1 and all(x.name in rows for x in profile.layers)
    held = [rows[x.name] if measured else x for x in profile.layers]
    parameters = np.array([float(r.param_bytes) for r in held])
    saved = np.array([float(r.saved_bytes_per_sample) for r in held])
    output = np.array([float(r.output_bytes_per_sample) for r in held])
    part = 1 if measured else degree
    return parameters / part, saved / part, output


def _largest(values: np.ndarray) -> np.ndarray:
    """Entry (i, j) is the maximum of values[i:j]; 0 where that is empty."""
    table = np.zeros((len(values) + 1, len(values) + 1))
    for i in range(len(values)):
        table[i, i + 1 :] = np.maximum.accumulate(values[i:])
    return table


def _highest(saved: np.ndarray, work: Sequence[float]) -> np.ndarray:
    """Entry (i, j): how far above all that layers i..j-1 save memory rises while one of them runs.

        max over k of (Σ saved of i..k + work of k) - Σ saved of i..j-1, at least 0

    Example: layers that save 10 and 10 with works 12 and 1: (0, 2) is max(22, 21) - 20 = 2.
    """
    n = len(saved)
    table = np.zeros((n + 1, n + 1))
    sums = _sums(saved)
    tops = sums[1:] + np.asarray(work, dtype=float)
    for i in range(n):
        highest = np.maximum.accumulate(tops[i:]) - sums[i]
        table[i, i + 1 :] = np.maximum(highest - (sums[i + 1 :] - sums[i]), 0.0)
    return table


def _sums(values: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], values.cumsum()])


def stage_memory(
    model: ModelBytes, i: int, j: int, *, samples: int, in_flight: int, recompute: bool = False
) -> StageMemory:
    """What a device that takes `samples` of each micro-batch through layers i..j-1 holds at its peak.

    Example: 100 bytes of parameters, as many of gradients, 200 of state, 10 saved bytes a sample, 4 samples
    and 3 in flight: 100 + 100 + 200 + 120 and twice what crosses the stage's ends, plus reduction buckets.
    """

    def of(sums: np.ndarray) -> float:
        return float(sums[j] - sums[i])

    first, last = np.int64(i), np.int64(j)
    entering = float(model.output[i - 1]) if i else 0.0
    leaving = float(model.output[j - 1])
    boundary = 2 * samples * (entering + leaving)
    if model.counted:
        given_back = leaving if j < model.num_layers else 0.0
        boundary = samples * (in_flight * float(model.at_ends(first, last, recompute=recompute)) + given_back)
    whole = float(model.peak(first, last, samples, in_flight, recompute=recompute))
    held = float(model.held(first, last))
    transient = samples * float(model.transient[i, j]) + float(model.transient_fixed[i, j])
    acts = samples * float(model.per_sample(first, last, in_flight, recompute=recompute))
    acts += (
        of(model.kept) * (1 if recompute else in_flight) - samples * float(model.transient[i, j]) - boundary
    )
    return StageMemory(
        parameters=of(model.parameters),
        gradients=of(model.gradients),
        optimizer=of(model.optimizer),
        buffers=of(model.buffers),
        activations=acts,
        boundary=boundary,
        # Where the optimiser's step is the peak, what is not held all the time counts as transient.
        transient=max(transient, whole - held - acts - boundary),
        reduction=float(model.underway(first, last)),
    )


def load_peak_bytes(
    parameters: float, optimizer: float, buffers: float, summed: float = 0.0, *, apart: bool
) -> float:
    """Peak while state is read and put in place, in bytes; `summed` are gradients that will be summed.

    A device with memory of its own (`apart`) gets each tensor once, as the file's contents lie on its host;
    on a CPU both lie in one memory. Room for sums of gradients is there before. Example: 100 bytes of
    parameters and 200 of state: 300, on a CPU 600.
    """
    return (1 if apart else 2) * (parameters + optimizer) + buffers + summed


def usable_bytes(device: Device, margin: float) -> float:
    """Bytes a plan may fill: memory × (1 - margin), no more than is free, less what the framework holds.

    Infinite where the memory is unknown, which a plan then says. Example: 10 GB at margin 0.1 give 9 GB.
    """
    if device.memory_bytes is None:
        return float("inf")
    usable = device.memory_bytes.value * (1 - margin)
    if device.free_memory_bytes is not None:
        usable = min(usable, device.free_memory_bytes.value)
    held = device.framework_bytes.value if device.framework_bytes else 0.0
    return max(usable - held, 0.0)
