"""Bytes a device holds while it runs a stage, by what holds them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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

    `transient` (i × j) is what comes and goes for each sample while one of layers i..j-1 runs backward.
    """

    parameters: np.ndarray
    gradients: np.ndarray
    optimizer: np.ndarray
    buffers: np.ndarray
    saved: np.ndarray
    output: np.ndarray
    transient: np.ndarray
    bucket_bytes: float

    @property
    def num_layers(self) -> int:
        return len(self.output)

    def fixed(self, i, j):
        """Bytes of layers i..j-1 whatever the micro-batch; arrays broadcast."""
        held = self.parameters + self.gradients + self.optimizer + self.buffers
        return held[j] - held[i] + np.minimum(2.0 * self.bucket_bytes, self.gradients[j] - self.gradients[i])

    def per_sample(self, i, j, in_flight: int, *, recompute: bool = False):
        """Bytes of layers i..j-1 for each sample of a micro-batch, with `in_flight` of them held.

        Without recompute every one in flight keeps all it saved; with it each keeps the stage's input, and
        the one whose backward runs has the rest again. What enters and leaves the stage is held twice
        (value, gradient).
        """
        saved = self.saved[j] - self.saved[i]
        entering = np.where(i > 0, self.output[i - 1], 0.0)
        leaving = self.output[j - 1]
        acts = in_flight * entering + saved if recompute else in_flight * saved
        return acts + 2 * (entering + leaving) + self.transient[i, j]


def model_bytes(profile: Profile, *, tensor_parallel: int = 1, trainer: Trainer = EVENER) -> ModelBytes:
    """Running sums of a profile's layers on each device of a group of `tensor_parallel`.

    Gradients and optimiser state go by each layer's share of parameters. A group's devices hold what
    `group_bytes` say, else even parts; all of them hold what crosses the ends of a stage.
    """
    layers = profile.layers
    whole = max(_bytes_once(layers), 1.0)
    parameters, saved, output = _held(profile, tensor_parallel)
    gradient = profile.gradient_bytes / whole if profile.gradient_bytes else 1.0
    return ModelBytes(
        parameters=_sums(parameters),
        gradients=_sums(parameters * gradient),
        optimizer=_sums(parameters * profile.state_bytes / whole),
        buffers=_sums(np.array([float(x.buffer_bytes) for x in layers])),
        saved=_sums(saved),
        output=output,
        transient=trainer.transient_layers * _largest(saved),
        bucket_bytes=trainer.bucket_bytes,
    )


def _bytes_once(layers: Sequence[Layer]) -> float:
    """Bytes of all parameters, those of tied layers once: what `gradient_bytes` and `state_bytes` are for.

    Of tied layers the largest counts, and what the others have beyond its bytes. Example: an embedding of 100
    bytes tied to a head of 100 count 100.
    """
    seen: dict[str, int] = {}
    total = 0.0
    for x in layers:
        shared = max((seen[name] for name in x.tied if name in seen), default=0)
        total += max(x.param_bytes - shared, 0)
        seen[x.name] = x.param_bytes
    return total


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

    boundary = 2 * samples * float((model.output[i - 1] if i else 0.0) + model.output[j - 1])
    transient = samples * float(model.transient[i, j])
    whole = samples * float(model.per_sample(np.int64(i), j, in_flight, recompute=recompute))
    return StageMemory(
        parameters=of(model.parameters),
        gradients=of(model.gradients),
        optimizer=of(model.optimizer),
        buffers=of(model.buffers),
        activations=whole - boundary - transient,
        boundary=boundary,
        transient=transient,
        reduction=min(2.0 * model.bucket_bytes, of(model.gradients)),
    )


def load_peak_bytes(memory: StageMemory) -> float:
    """Peak while a checkpoint is read: parameters and state twice, as file contents and in place."""
    return 2 * (memory.parameters + memory.optimizer) + memory.buffers
