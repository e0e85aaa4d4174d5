"""A forward written down by torch.export: for models whose own Python looks into tensors.

Layers stay what they are: while torch.export runs, each is one opaque operator, whose result has the shapes
that the layer gives; in the program that operator is the layer again. Only the glue between layers becomes
aten.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from evener.runtime.cutting.call import Call
from evener.runtime.cutting.program import (
    ARITHMETIC,
    Program,
    TraceError,
    is_stateless,
    size_at,
    tensors_in,
    tidy,
)

_CHECKS = {
    "_assert_scalar.default",
    "_assert_tensor_metadata.default",
    "_assert_async.default",
    "_assert_async.msg",
    "sym_constrain_range.default",
    "sym_constrain_range_for_size.default",
}


@dataclass(kw_only=True)
class _LayerCall:
    """One call of a layer during the export; `result` is known once its shapes have been computed."""

    name: str
    module: nn.Module
    spec: TreeSpec
    leaves: list[Any]  # tensors and sizes are None here
    kinds: list[str]
    result: TreeSpec | None = None
    result_leaves: list[Any] | None = None

    def arguments(self, tensors: Sequence[Any], sizes: Sequence[Any]) -> tuple[tuple, dict]:
        given = {"tensor": iter(tensors), "size": iter(sizes)}
        leaves = [next(given[k]) if k in given else v for k, v in zip(self.kinds, self.leaves, strict=True)]
        return tree_unflatten(leaves, self.spec)


_running: list["_Exporter"] = []


@torch.library.custom_op("evener::layer", mutates_args=())
def _layer(tensors: list[Tensor], sizes: list[int], call: int) -> list[Tensor]:
    raise RuntimeError("evener::layer only stands in for a layer while a model is exported")


@_layer.register_fake
def _(tensors: list[Tensor], sizes: list[Any], call: int) -> list[Tensor]:
    return _running[-1].shapes(call, tensors, sizes)


def export(
    model: nn.Module, layers: Mapping[str, nn.Module], call: Call, tensors: tuple[Tensor, ...]
) -> Program:
    """The program of `model` called with `tensors`; TraceError says what torch.export made of it."""
    exporter = _Exporter(model, layers, call)
    inputs = tuple(t.detach().clone() for t in tensors)
    shapes = [dict.fromkeys(range(t.dim()), torch.export.Dim.AUTO) for t in inputs]
    try:
        with exporter.standing_in(), redirect_stderr(StringIO()):  # on failure it prints its graph
            exported = torch.export.export(
                _Flat(model, exporter), inputs, dynamic_shapes={"tensors": tuple(shapes)}, strict=False
            )
    except Exception as error:  # torch.export raises what it meets, also the model's own errors
        raise TraceError(f"torch.export: {_first_line(error)}") from error
    return _Translation(exported, exporter).program()


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


class _Flat(nn.Module):
    """The model as torch.export sees it: flat tensors in, flat tensors out."""

    def __init__(self, model: nn.Module, exporter: "_Exporter") -> None:
        super().__init__()
        self.model = model
        self._exporter = exporter

    def forward(self, *tensors: Tensor) -> list[Any]:
        return self._exporter.forward(self.model, tensors)


class _Exporter:
    """What the layers and the output were while torch.export ran; it keeps nothing that a module is given."""

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module], call: Call) -> None:
        self._call_of_model = call
        paths = {id(m): name for name, m in model.named_modules()}
        stateless = {id(m): paths[id(m)] for m in model.modules() if m is not model and is_stateless(m)}
        self._layers = {**stateless, **{id(m): name for name, m in layers.items()}}
        self._modules = [m for m in model.modules() if id(m) in self._layers]
        self._inside = False
        self.calls: list[_LayerCall] = []
        self.spec: TreeSpec | None = None
        self.constants: dict[int, Any] = {}

    def forward(self, model: nn.Module, tensors: tuple[Tensor, ...]) -> list[Any]:
        self.calls.clear()
        args, kwargs = self._call_of_model.unflatten(tensors)
        leaves, self.spec = tree_flatten(model(*args, **kwargs))
        carried = (Tensor, torch.SymInt)
        self.constants = {i: v for i, v in enumerate(leaves) if not isinstance(v, carried)}
        for value in self.constants.values():
            if not isinstance(value, int | float | bool | str | type(None)):
                raise TraceError(f"the model's output holds a {type(value).__name__}, which is no tensor")
        return [v for v in leaves if isinstance(v, carried)]

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Layers give way to the operator; their hooks rest, as the program calls layers with their hooks."""
        kept = [(m, dict(m.__dict__)) for m in self._modules]
        _running.append(self)
        try:
            for module in self._modules:
                module.__dict__.update(
                    forward=partial(self._stand_in, module), _forward_hooks={}, _forward_pre_hooks={}
                )
            yield
        finally:
            _running.pop()
            for module, attributes in kept:
                module.__dict__.clear()
                module.__dict__.update(attributes)

    def _stand_in(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return type(module).forward(module, *args, **kwargs)
        name = self._layers[id(module)]
        leaves, spec = tree_flatten((args, kwargs))
        kinds = [_kind(leaf, name) for leaf in leaves]
        call = _LayerCall(
            name=name,
            module=module,
            spec=spec,
            leaves=[v if k == "constant" else None for k, v in zip(kinds, leaves, strict=True)],
            kinds=kinds,
        )
        self.calls.append(call)
        tensors = [v for k, v in zip(kinds, leaves, strict=True) if k == "tensor"]
        sizes = [v for k, v in zip(kinds, leaves, strict=True) if k == "size"]
        results = iter(_layer(tensors, sizes, len(self.calls) - 1))
        assert call.result is not None and call.result_leaves is not None
        filled = [next(results) if isinstance(v, Tensor) else v for v in call.result_leaves]
        return tree_unflatten(filled, call.result)

    def shapes(self, number: int, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
        call = self.calls[number]
        args, kwargs = call.arguments(tensors, sizes)
        self._inside = True
        try:
            value = call.module(*args, **kwargs)
        finally:
            self._inside = False
        call.result_leaves, call.result = tree_flatten(value)
        odd = [type(v).__name__ for v in call.result_leaves if not isinstance(v, _PLAIN)]
        if odd:
            raise TraceError(f"layer {call.name!r} gives a {odd[0]}, which is no tensor")
        given = {id(t) for t in tensors}
        found = [v for v in call.result_leaves if isinstance(v, Tensor)]
        # An operator may not return what it was given; for shapes a fresh tensor says the same.
        return [torch.empty_like(v) if id(v) in given else v for v in found]


_PLAIN = (Tensor, int, float, bool, str, type(None))


def _kind(leaf: Any, layer: str) -> str:
    if isinstance(leaf, Tensor):
        return "tensor"
    if isinstance(leaf, torch.SymInt):
        return "size"
    if isinstance(leaf, (*_PLAIN, torch.dtype, torch.device)):
        return "constant"
    raise TraceError(f"layer {layer!r} is given a {type(leaf).__name__}, which is no tensor")


class _Translation:
    """From torch.export's graph to a program: parameters by name, layers as layers, sizes as sizes."""

    def __init__(self, exported: torch.export.ExportedProgram, exporter: _Exporter) -> None:
        self._exported, self._exporter = exported, exporter
        self._graph = fx.Graph()
        self._env: dict[fx.Node, Any] = {}
        self._constants: dict[str, Tensor] = {}

    def program(self) -> Program:
        signature = self._exported.graph_signature
        if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
            written = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
            raise TraceError(f"torch.export: the forward between its layers writes to {', '.join(written)}")
        nodes = list(self._exported.graph.nodes)
        self._inputs(nodes)
        for node in nodes:
            if node.op == "call_function":
                self._step(node)
            elif node.op not in ("placeholder", "output"):
                raise TraceError(f"torch.export: {node.op} {node.target} in the forward between its layers")
        returned = iter(self._exported.graph.output_node().args[0])  # type: ignore[arg-type]
        exporter = self._exporter
        assert exporter.spec is not None
        results = tuple(
            exporter.constants[i] if i in exporter.constants else self._value(next(returned))
            for i in range(exporter.spec.num_leaves)
        )
        self._graph.output(results)
        tidy(self._graph)
        return Program(
            graph=self._graph,
            spec=exporter.spec,
            results=results,
            tracer="exported",
            constants=self._constants,
        )

    def _inputs(self, nodes: list[fx.Node]) -> None:
        signature = self._exported.graph_signature
        own = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        users = set(signature.user_inputs)
        placeholders = [n for n in nodes if n.op == "placeholder"]
        for node in placeholders:
            if node.name in users:
                self._env[node] = self._graph.placeholder(f"input_{len(self._env)}")
        for node in placeholders:
            if node.name in own:
                self._env[node] = self._graph.create_node("get_attr", own[node.name].removeprefix("model."))
            elif node.name in signature.inputs_to_lifted_tensor_constants:
                target = signature.inputs_to_lifted_tensor_constants[node.name]
                name = f"constant_{len(self._constants)}"
                self._constants[name] = self._exported.constants[target]
                self._env[node] = self._graph.create_node("get_attr", name)
            elif node not in self._env:
                raise TraceError(f"torch.export: an input of unknown kind, {node.name}")

    def _step(self, node: fx.Node) -> None:
        target: Any = node.target
        name = getattr(target, "__name__", str(target))
        if name in _CHECKS or (isinstance(node.meta.get("val"), torch.SymBool | bool)):
            return  # guards of the export; the sizes at which a cut holds are checked by running it
        if str(target).startswith("evener.layer"):
            self._layer(node)
        elif target is torch.ops.aten.sym_size.int:
            self._env[node] = self._number(size_at, node.args)
        elif target in ARITHMETIC and not isinstance(node.meta.get("val"), Tensor):
            self._env[node] = self._number(target, node.args)
        elif isinstance(target, torch._ops.HigherOrderOperator):
            raise TraceError(f"torch.export: {name} in the forward between its layers")
        else:
            self._env[node] = self._graph.node_copy(node, self._value)
            self._env[node].meta.clear()

    def _number(self, function: Any, args: tuple) -> fx.Node:
        node = self._graph.call_function(function, fx.node.map_arg(args, self._value))
        node.meta["number"] = True
        return node

    def _layer(self, node: fx.Node) -> None:
        given: Any = fx.node.map_arg(node.args, self._value)
        tensors, sizes, number = given
        call = self._exporter.calls[number]
        args, kwargs = call.arguments(tensors, sizes)
        step = self._graph.call_module(call.name, args, kwargs)
        self._env[node] = self._graph.call_function(tensors_in, (step,))

    def _value(self, node: fx.Node) -> fx.Node:
        if node not in self._env:
            raise TraceError(f"torch.export: {node} depends on a guard")
        return self._env[node]
