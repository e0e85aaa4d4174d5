"""A forward written down while it runs on the example: layers are steps as they are, glue is recorded.

The model's own Python runs, with real tensors, so whatever it does before and between its layers is done.
Sizes are recorded as numbers that know where they came from; a value read out of a tensor (`if
mask.all():`) decides the steps for this example only, and is refused.
"""

import operator
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

from evener.runtime.cutting.call import Call
from evener.runtime.cutting.program import (
    RANDOM_WORDS,
    Program,
    TraceError,
    call_layers,
    is_stateless,
    plain_tensors,
    size_at,
    tidy,
    without_gradient,
)

READS_DATA = {
    "__bool__", "__contains__", "__int__", "__float__", "__index__", "__complex__", "item", "tolist", "numpy",
    "__array__", "equal", "allclose", "is_nonzero",
}  # fmt: skip
_SELECTING = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "repeat_interleave"}
_OPERATORS: dict[str, Callable] = {"__getitem__": operator.getitem, "__setitem__": operator.setitem}
_CONSTANTS = (int, float, complex, bool, str, bytes, type(None), type(...), torch.dtype, torch.device,
              torch.layout, torch.memory_format)  # fmt: skip


def record(
    model: nn.Module, layers: Mapping[str, nn.Module], call: Call, tensors: tuple[Tensor, ...]
) -> Program:
    """The program of `model` called with `tensors`; TraceError says what cannot be recorded."""
    recorder = _Recorder(model, layers)
    inputs = [recorder.placeholder(f"input_{i}", t) for i, t in enumerate(tensors)]
    args, kwargs = call.unflatten(inputs)
    before = {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    try:
        with call_layers(recorder.module_call) as patched, recorder:
            recorder.real_call = patched.real
            output = model(*args, **kwargs)
            leaves, spec = tree_flatten(output)
            results = tuple(recorder.result(leaf) for leaf in leaves)
    finally:
        recorder.active = False
    after = {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    changed = [name for name in before if after.get(name) != before[name]]
    if changed:
        raise TraceError(f"the forward between its layers assigns a new tensor to {', '.join(changed)}")
    recorder.graph.output(results)
    tidy(recorder.graph)
    return Program(
        graph=recorder.graph, spec=spec, results=results, tracer="recorded", constants=recorder.constants
    )


class _Number:
    """A size, or what was computed from sizes: a plain number that knows its node."""

    node: fx.Node
    recorder: "_Recorder"


class _Int(int, _Number):
    pass


class _Float(float, _Number):
    pass


def _arithmetic(name: str, function: Callable, *, reflected: bool) -> None:
    def method(self: Any, *others: Any) -> Any:
        base = int if isinstance(self, int) else float
        operands = [base(self), *(_plain(o) for o in others)]
        traced = [self, *others]
        if not all(isinstance(o, int | float) for o in operands):
            return NotImplemented  # a tensor on the other side: its own method records the operation
        if reflected:
            operands.reverse()
            traced.reverse()
        value = function(*operands)
        return self.recorder.number(value, function, tuple(traced))

    for kind in (_Int, _Float):
        setattr(kind, name, method)


for _name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow"):
    _arithmetic(f"__{_name}__", getattr(operator, _name), reflected=False)
    _arithmetic(f"__r{_name}__", getattr(operator, _name), reflected=True)
_arithmetic("__neg__", operator.neg, reflected=False)


def _plain(value: Any) -> Any:
    """A recorded number as an ordinary one."""
    if isinstance(value, _Number):
        return int(value) if isinstance(value, int) else float(value)  # type: ignore[arg-type]
    return value


def _plain_tree(value: Any) -> Any:
    """`value` with ordinary numbers in its tuples, lists, dicts and slices."""
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    if isinstance(value, torch.Size):
        return torch.Size([_plain(v) for v in value])
    if type(value) is tuple or type(value) is list:
        return type(value)(_plain_tree(v) for v in value)
    if type(value) is dict:
        return {k: _plain_tree(v) for k, v in value.items()}
    return _plain(value)


class _Recorder(TorchFunctionMode):
    """Sees every call of torch made by glue, and every call of a module."""

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.active = True
        self.real_call: Callable = nn.Module.__call__
        self.constants: dict[str, Tensor] = {}
        paths = {id(m): name for name, m in model.named_modules()}
        stateless = {id(m): paths[id(m)] for m in model.modules() if m is not model and is_stateless(m)}
        self._layers = {**stateless, **{id(m): name for name, m in layers.items()}}
        self._own = {id(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]}
        self._plain = {id(t): n for n, t in plain_tensors(model) if id(t) not in self._own}
        self._nodes: dict[int, fx.Node] = {}
        self._last_input: fx.Node | None = None
        self._alive: list[Any] = []  # ids are only good while their objects live
        self._device_type = _device_type(model)
        self._autocast = torch.is_autocast_enabled(self._device_type)

    def placeholder(self, name: str, tensor: Tensor) -> Tensor:
        self._last_input = self.graph.placeholder(name)
        self._bind(tensor, self._last_input)
        return tensor

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if not self.active or func is torch._C._set_grad_enabled:
            return func(*args, **kwargs)
        if name in READS_DATA:
            self._refuse_data(name, args)
            return func(*_plain_tree(args), **_plain_tree(kwargs))
        owner = getattr(func, "__self__", None)
        if name == "__set__":
            raise TraceError(f"the forward sets {getattr(owner, '__name__', 'an attribute')} of a tensor")
        value = func(*_plain_tree(args), **_plain_tree(kwargs))
        if name == "__get__":
            if isinstance(value, torch.Size):
                return self._sizes(args[0], value)
            return self._step(getattr, (args[0], owner.__name__), {}, value) if _has_tensor(value) else value  # type: ignore[union-attr]
        if name == "size" and isinstance(value, torch.Size):
            return self._sizes(args[0], value)
        if name in ("size", "__len__") and isinstance(value, int):
            dim = (*args[1:], *kwargs.values(), 0)[0]
            return self.number(value, size_at, (args[0], _plain(dim)))
        if name == "numel":
            return self.number(value, torch.numel, (args[0],))
        if value is None or _has_tensor(value):
            return self._step(func, args, kwargs, value)
        return value  # what a tensor is, not what it holds: device, dtype, number of dimensions

    def _refuse_data(self, name: str, args: Any) -> None:
        """What follows from sizes alone (is arange(5) sorted?) holds for every batch of those sizes."""
        if any(_holds_data(n) for n in _nodes_in(self.argument(tuple(args), name))):
            raise TraceError(f"the forward reads a value out of a tensor ({name.strip('_')}) {self._where()}")

    def _where(self) -> str:
        """The line of the model's own code that is running, and the layer before it."""
        calls = self.graph.find_nodes(op="call_module")
        after = f"after layer {str(calls[-1].target)!r}" if calls else "before the first layer"
        own = (os.path.dirname(torch.__file__), os.path.dirname(__file__))
        frames = [f for f in traceback.extract_stack() if not f.filename.startswith(own)]
        line = frames[-1]
        return f"{after}, at {os.path.basename(line.filename)}:{line.lineno}: {line.line}"

    def _sizes(self, tensor: Tensor, sizes: torch.Size) -> torch.Size:
        return torch.Size([self.number(n, size_at, (tensor, d)) for d, n in enumerate(sizes)])

    def number(self, value: Any, function: Callable, args: tuple) -> Any:
        """`value` with the node that computes it."""
        if not self.active or isinstance(value, complex):
            return value
        node = self.graph.call_function(function, self.argument(args, function.__name__))
        node.meta["number"] = True
        if any(n.meta.get("selects") for tensor in node.all_input_nodes for n in _glue_before(tensor)):
            raise TraceError(
                f"the forward reads a size that depends on the values of a tensor {self._where()}"
            )
        traced: Any = _Int(value) if isinstance(value, int) else _Float(value)
        traced.node, traced.recorder = node, self
        return traced

    def _step(self, func: Callable, args: Any, kwargs: Any, value: Any) -> Any:
        what = getattr(func, "__name__", str(func))
        node = self._call(func, what, self.argument(tuple(args), what), self.argument(kwargs, what))
        node.meta["selects"] = _selects(what, args)
        return self._bound(node, value, what, seen={id(a) for a in args if isinstance(a, Tensor)})

    def _call(self, func: Callable, name: str, args: Any, kwargs: Any) -> fx.Node:
        """Methods of tensors are called by name, so that steps can be printed and pickled."""
        if getattr(torch.Tensor, name, None) is not func:
            return self.graph.call_function(func, args, kwargs)
        if name in _OPERATORS:
            return self.graph.call_function(_OPERATORS[name], args)
        return self.graph.call_method(name, args, kwargs)

    def module_call(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        name = self._layers.get(id(module))
        if not self.active or name is None:
            return self.real_call(module, *args, **kwargs)
        steps = self.argument(args, name), self.argument(kwargs, name)
        self.active = False
        try:
            value = self.real_call(module, *_plain_tree(args), **_plain_tree(kwargs))
        finally:
            self.active = True
        return self._bound(self.graph.call_module(name, *steps), value, name)

    def _bound(self, node: fx.Node, value: Any, what: str, seen: set[int] | None = None) -> Any:
        if torch.is_autocast_enabled(self._device_type) != self._autocast:
            raise TraceError(f"the forward switches autocast around {what}")
        if not torch.is_grad_enabled():
            if value is None or any(id(t) in (seen or ()) for t in _parts(value)):
                raise TraceError(f"the forward writes in place under no_grad ({what})")
            node = self.graph.call_function(without_gradient, (node,))
        self._bind(value, node)
        return value

    def _bind(self, value: Any, node: fx.Node, depth: int = 0) -> None:
        """Remember that `value` and what is in it come from `node`."""
        if isinstance(value, _CONSTANTS) or depth > 4:
            return
        self._nodes[id(value)] = node
        self._alive.append(value)
        for getter, key, part in _members(value):
            self._bind(part, self.graph.call_function(getter, (node, key)), depth + 1)

    def result(self, leaf: Any) -> Any:
        """A leaf of the model's output: a node, or a constant."""
        if not isinstance(leaf, (Tensor, *_CONSTANTS)):
            raise TraceError(f"the model's output holds a {type(leaf).__name__}, which is no tensor")
        return self.argument(leaf, "the model's output")

    def argument(self, value: Any, what: str) -> Any:
        """`value` as an argument of a step: tensors and recorded numbers become their nodes."""
        if isinstance(value, _Number):
            return value.node
        if isinstance(value, Tensor):
            return self._tensor(value, what)
        if isinstance(value, slice):
            return slice(*(self.argument(v, what) for v in (value.start, value.stop, value.step)))
        if type(value) in (tuple, list, torch.Size):
            return (list if type(value) is list else tuple)(self.argument(v, what) for v in value)
        if type(value) is dict:
            return {k: self.argument(v, what) for k, v in value.items()}
        if isinstance(value, _CONSTANTS):
            return value
        if id(value) in self._nodes:
            return self._nodes[id(value)]
        raise TraceError(f"{what} holds or is given a {type(value).__name__}, which is no tensor")

    def _tensor(self, tensor: Tensor, what: str) -> fx.Node:
        key = id(tensor)
        if key not in self._nodes:
            name = self._own.get(key) or self._plain.get(key)
            if name is None:
                raise TraceError(f"{what} is given a tensor that no recorded step has made")
            if key in self._plain:
                self.constants[name] = tensor
            with self.graph.inserting_after(self._last_input):
                self._nodes[key] = self._last_input = self.graph.create_node("get_attr", name)
        return self._nodes[key]


def _nodes_in(argument: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(argument, lambda n: found.append(n))
    return found


def _glue_before(node: fx.Node) -> Iterator[fx.Node]:
    """`node` and the steps it is computed from, back to sizes, layers and inputs."""
    seen, ahead = {node}, [node]
    while ahead:
        step = ahead.pop()
        yield step
        if step.op in ("call_function", "call_method") and step.target is not size_at:
            new = [n for n in step.all_input_nodes if n not in seen]
            seen.update(new)
            ahead += new


def _holds_data(node: fx.Node) -> bool:
    """True where a value depends on more than sizes."""
    return any(
        n.op not in ("call_function", "call_method")
        or any(word in str(n.target).lower() for word in RANDOM_WORDS)
        for n in _glue_before(node)
    )


def _selects(name: str, args: Any) -> bool:
    """True for functions whose result is as large as the values say."""
    index = args[1] if name == "__getitem__" else ()
    parts = index if isinstance(index, tuple) else (index,)
    masked = any(isinstance(p, Tensor) and p.dtype in (torch.bool, torch.uint8) for p in parts)
    return masked or name in _SELECTING or (name == "where" and len(args) == 1)


def _members(value: Any):
    """(how to get it, key, part) of what is in `value`."""
    if isinstance(value, Mapping):
        yield from ((operator.getitem, k, v) for k, v in value.items() if isinstance(k, str | int))
    elif isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        yield from ((operator.getitem, i, v) for i, v in enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((getattr, f.name, getattr(value, f.name)) for f in fields(value))


def _parts(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map_only(Tensor, found.append, value)
    return found


def _has_tensor(value: Any) -> bool:
    return bool(_parts(value))


def _device_type(model: nn.Module) -> str:
    kinds = {t.device.type for t in [*model.parameters(), *model.buffers()]} - {"meta"}
    return min(kinds, default="cpu")
