"""One stage of a cut model: it takes what crosses the cut before it and gives what later stages need."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from evener.errors import ModelError
from evener.runtime.cutting.placing import Places, name_of
from evener.runtime.cutting.program import is_number, size_at


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One tensor of a carry.

    A size travels as a tensor of shape (size, 0): no bytes, and it is split by samples like its neighbours.
    `sample_dim` is the dimension that grows with the micro-batch, None where the tensor is the same for all
    samples; `per_sample` is how many entries of it belong to one sample; `num_bytes` are those of the
    example, `dtype` is the model's own, before any mixed precision (None for a size).
    """

    name: str
    kind: Literal["tensor", "size"]
    sample_dim: int | None
    per_sample: int
    num_bytes: int
    dtype: torch.dtype | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """A program's steps from one cut to the next, as a function of the carry and of tensors of the model."""

    run: fx.GraphModule
    own: tuple[str, ...]
    layers: tuple[str, ...]
    notes: tuple[str, ...]


class StageModule(nn.Module):
    """Consecutive layers of a model and the glue between them: carry in, carry out.

    Both carries are tuples of tensors; `takes` and `gives` describe them. Tensors that later stages need pass
    through. Layers and parameters are the user's own objects. forward raises ModelError for a carry of
    another length.
    """

    def __init__(
        self,
        held: nn.Module,
        parts: dict[bool, Part],
        takes: dict[bool, tuple[Slot, ...]],
        gives: dict[bool, tuple[Slot, ...]],
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.held = held
        self._hidden = hidden
        self._takes, self._gives = takes, gives
        # Kept from nn.Module's eyes: they call the same layers that `held` has under the user's names.
        self._runs = {mode: part.run for mode, part in parts.items()}
        self._own = {mode: [_owner(held, name) for name in part.own] for mode, part in parts.items()}
        self._called = set.intersection(*({*part.layers} for part in parts.values()))

    def forward(self, carry: Sequence[Tensor]) -> tuple[Tensor, ...]:
        mode = self.training
        if len(carry) != len(self._takes[mode]):
            raise ModelError(
                "a stage was given another number of tensors than crosses the cut before it",
                numbers=f"{len(carry)} given, {len(self._takes[mode])} cross",
            )
        own = [getattr(owner, key) for owner, key in self._own[mode]]
        return self._runs[mode].forward(*carry, *own)

    @property
    def takes(self) -> tuple[Slot, ...]:
        """What forward is given, in the present mode (train or eval)."""
        return self._takes[self.training]

    @property
    def gives(self) -> tuple[Slot, ...]:
        """What forward returns, in the present mode (train or eval)."""
        return self._gives[self.training]

    @property
    def used_directly(self) -> list[tuple[nn.Module, str]]:
        """(owner, name) of the parameters that are used outside of their layers' own forward."""
        found = [place for own in self._own.values() for place in own]
        return [(owner, key) for owner, key in found if owner._parameters.get(key) is not None]

    def runner_of(self, layer: str) -> nn.Module:
        """What runs when the layer's tensors are used: the layer, or the stage where others use them too."""
        if layer not in self._called:
            return self
        module = self.held.get_submodule(layer)
        used = {id(owner._parameters[key]) for owner, key in self.used_directly}
        return self if any(id(p) in used for p in module.parameters()) else module

    @property
    def named(self) -> dict[str, Tensor]:
        """The user's full names → parameters and buffers held here; a tied one under each of its names."""
        params = self.held.named_parameters(remove_duplicate=False)
        buffers = self.held.named_buffers(remove_duplicate=False)
        return {name: t for name, t in [*params, *buffers] if name not in self._hidden}


def _owner(held: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return held.get_submodule(path), key


def hold(
    model: nn.Module, layers: Sequence[str], tensors: dict[str, Tensor], constants: set[str]
) -> nn.Module:
    """A tree with the user's names that has `layers` of `model` and `tensors` in their places."""
    tree = nn.Module()
    for name in layers:
        path, _, key = name.rpartition(".")
        _branch(tree, path).add_module(key, model.get_submodule(name))
    for name, tensor in tensors.items():
        add_tensor(tree, model, name, tensor, constant=name in constants)
    return tree


def add_tensor(
    tree: nn.Module, model: nn.Module, name: str, tensor: Tensor, *, constant: bool = False
) -> None:
    """Put `tensor` into `tree` under its name in `model`, unless its layer is there as a whole."""
    path, _, key = name.rpartition(".")
    branch = _branch(tree, path)
    if key in branch._parameters or key in branch._buffers:
        return
    if isinstance(tensor, nn.Parameter):
        branch.register_parameter(key, tensor)
    else:
        fleeting = constant or key in model.get_submodule(path)._non_persistent_buffers_set
        branch.register_buffer(key, tensor, persistent=not fleeting)


def _branch(tree: nn.Module, path: str) -> nn.Module:
    for key in path.split(".") if path else ():
        if key not in tree._modules:
            tree.add_module(key, nn.Module())
        tree = tree._modules[key]  # type: ignore[assignment]
    return tree


def as_size(number: int, like: Tensor) -> Tensor:
    """A size as a tensor without bytes. Example: 7 becomes a tensor of shape (7, 0)."""
    return torch.empty(number, 0, dtype=torch.bool, device=like.device)


def build(places: Places, model: nn.Module, start: int, end: int, device: torch.device) -> Part:
    """The steps from `start` up to `end` as a function; constants on `device` follow the carry's device."""
    builder = _Builder(places, start, end, device)
    for node in places.nodes[start:end]:
        builder.copy(node)
    outputs = places.crossing(end)
    builder.graph.output(tuple(builder.leaving(node) for node in outputs))
    layers = {str(n.target): model.get_submodule(str(n.target)) for n in places.nodes[start:end] if _calls(n)}
    return Part(
        run=fx.GraphModule(layers, builder.graph),  # type: ignore[arg-type]
        own=tuple(builder.own),
        layers=tuple(layers),
        notes=tuple(builder.notes),
    )


def _calls(node: fx.Node) -> bool:
    return node.op == "call_module"


class _Builder:
    def __init__(self, places: Places, start: int, end: int, device: torch.device) -> None:
        self.graph = fx.Graph()
        self.own: dict[str, fx.Node] = {}
        self.notes: list[str] = []
        self._places, self._device = places, device
        self._env: dict[fx.Node, fx.Node] = {}
        self._here: fx.Node | None = None
        slots = places.crossing(start)
        inputs = [self.graph.placeholder(f"carry_{i}") for i in range(len(slots))]
        self._first, self._last_input = inputs[0], inputs[-1]
        self._sizes = {n: given for n, given in zip(slots, inputs, strict=True) if is_number(n)}
        for node, given in zip(slots, inputs, strict=True):
            self._env[node] = self._entering(node, given, places.written_in(start, end, node))

    def _entering(self, node: fx.Node, given: fx.Node, writers: list[fx.Node]) -> fx.Node:
        if is_number(node):
            return self.graph.call_function(size_at, (given, 0))
        if writers:
            # What came over the wire is a leaf of this stage's graph, and leaves cannot be written to.
            self.notes.append(
                f"{name_of(writers[0])} writes in place to {name_of(node)} of an earlier stage: "
                "it works on a copy"
            )
            return self.graph.call_function(torch.clone, (given,))
        return given

    def leaving(self, node: fx.Node) -> fx.Node:
        if node in self._sizes:
            return self._sizes[node]  # passes through as it came
        value = self._value(node)
        return self.graph.call_function(as_size, (value, self._first)) if is_number(node) else value

    def copy(self, node: fx.Node) -> fx.Node:
        new = self.graph.node_copy(node, self._value)
        new.args, new.kwargs = self._on_this_device(new.args), self._on_this_device(new.kwargs)
        self._env[node] = new
        return new

    def _value(self, node: fx.Node) -> fx.Node:
        if node in self._env:
            return self._env[node]
        if node.op == "get_attr":
            return self._own_tensor(node)
        assert node in self._places.repeatable, f"{name_of(node)} was not carried"
        return self.copy(node)

    def _own_tensor(self, node: fx.Node) -> fx.Node:
        name = str(node.target)
        if name not in self.own:
            with self.graph.inserting_after(self._last_input):
                self._last_input = self.own[name] = self.graph.placeholder(f"own_{len(self.own)}")
        return self.own[name]

    def _on_this_device(self, args: Any) -> Any:
        """A device written into the steps is where the example was; the stage may be elsewhere."""
        return fx.node.map_aggregate(args, self._device_of)

    def _device_of(self, value: Any) -> Any:
        if not isinstance(value, torch.device) or value.type != self._device.type:
            return value
        if self._here is None:
            with self.graph.inserting_after(self._last_input):
                self._here = self.graph.call_function(getattr, (self._first, "device"))
        return self._here
