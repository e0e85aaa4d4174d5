"""The tables of one profile on one fleet, from which plans are priced."""

from dataclasses import dataclass, field
from typing import Any

from evener.core.fleet import Fleet
from evener.core.plan import Pipeline, Stage
from evener.core.profile import Profile
from evener.cost.communication import Network
from evener.cost.layers import LayerCost, layer_cost
from evener.cost.memory import ModelBytes, model_bytes
from evener.cost.step import StepCost, step_cost
from evener.cost.trainer import EVENER, Trainer
from evener.errors import OutOfRangeError, UnknownNameError


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Everything needed to price plans of one profile on one fleet; tables are made when first used.

    `places` is where each layer stands in the chain.
    """

    fleet: Fleet
    profile: Profile
    side: int = 0
    trainer: Trainer = EVENER
    network: Network = field(init=False)
    bytes: ModelBytes = field(init=False)
    places: dict[str, int] = field(init=False)
    _layers: dict[tuple[str, int], LayerCost] = field(default_factory=dict)
    _steps: dict[str, StepCost | None] = field(default_factory=dict)
    _pipelines: dict[Pipeline, Any] = field(default_factory=dict)
    _bytes: dict[int, ModelBytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "network", Network(fleet=self.fleet))
        object.__setattr__(self, "bytes", self.bytes_at(1))
        places = {layer.name: i for i, layer in enumerate(self.profile.layers)}
        object.__setattr__(self, "places", places)

    def span(self, stage: Stage) -> tuple[int, int]:
        """First and end layer of a stage, by place in the chain."""
        return self.places[stage.layers[0]], self.places[stage.layers[-1]] + 1

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

    def rows_s(self, name: str, span: tuple[int, int], samples: int) -> float:
        """Seconds a step in which device `name` waits for gradients of tables' rows on their way to the host.

        `samples` are those of its last micro-batch: those of earlier ones leave while it computes. 0 where
        it holds only a part of the layers.
        """
        step = self.step(self.fleet.device(name).kind)
        whole = step and span == (0, self.bytes.num_layers)
        return float(step.rows_s[min(samples, step.largest)]) if step and whole else 0.0

    def step(self, kind: str) -> StepCost | None:
        """Whole-model figures of `kind` (overheads, input, peak), None where only layers were measured."""
        if kind not in self._steps:
            try:
                measured = any(s.kind == kind for s in self.profile.steps)
                self._steps[kind] = step_cost(self.profile, kind, self.side) if measured else None
            except (UnknownNameError, OutOfRangeError):
                self._steps[kind] = None
        return self._steps[kind]
