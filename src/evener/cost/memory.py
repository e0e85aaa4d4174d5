"""Bytes a device holds while it runs a stage, by what holds them."""

from dataclasses import dataclass

import numpy as np

from evener.core.buckets import BUCKET_BYTES
from evener.core.profile import Profile


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes by holder at the moment of the peak: the first backward with all micro-batches in flight."""

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    boundary: float
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
            + self.reduction
        )


@dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """Running sums over the chain: entry i is the sum of layers before i."""

    parameters: np.ndarray
    gradients: np.ndarray
    optimizer: np.ndarray
    buffers: np.ndarray
    saved: np.ndarray
    output: np.ndarray

    @property
    def num_layers(self) -> int:
        return len(self.output)

    def fixed(self, i, j):
        """Bytes of layers i..j-1 whatever the micro-batch; arrays broadcast."""
        held = self.parameters + self.gradients + self.optimizer + self.buffers
        return held[j] - held[i] + np.minimum(2.0 * BUCKET_BYTES, self.gradients[j] - self.gradients[i])

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
        return acts + 2 * (entering + leaving)


def model_bytes(profile: Profile) -> ModelBytes:
    """Running sums of a profile's layers. Gradients and optimiser state go by each layer's share of
    parameters.
    """
    layers = profile.layers
    parameters = np.array([float(x.param_bytes) for x in layers])
    whole = max(parameters.sum(), 1.0)
    gradient = profile.gradient_bytes / whole if profile.gradient_bytes else 1.0
    return ModelBytes(
        parameters=_sums(parameters),
        gradients=_sums(parameters * gradient),
        optimizer=_sums(parameters * profile.state_bytes / whole),
        buffers=_sums(np.array([float(x.buffer_bytes) for x in layers])),
        saved=_sums(np.array([float(x.saved_bytes_per_sample) for x in layers])),
        output=np.array([float(x.output_bytes_per_sample) for x in layers]),
    )


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
    whole = samples * float(model.per_sample(np.int64(i), j, in_flight, recompute=recompute))
    return StageMemory(
        parameters=of(model.parameters),
        gradients=of(model.gradients),
        optimizer=of(model.optimizer),
        buffers=of(model.buffers),
        activations=whole - boundary,
        boundary=boundary,
        reduction=min(2.0 * BUCKET_BYTES, of(model.gradients)),
    )


def load_peak_bytes(memory: StageMemory) -> float:
    """Peak while a checkpoint is read: parameters and state twice, as file contents and in place."""
    return 2 * (memory.parameters + memory.optimizer) + memory.buffers
