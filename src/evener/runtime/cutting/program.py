"""A model's forward as a list of steps in the order in which they run: its layers, and the glue between them.

placeholder          a tensor of the call
get_attr             a parameter or buffer that glue reads
call_module          a layer
call_function        glue
output               tensors and sizes of the result, in the order of its leaves
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map_only, tree_unflatten

RANDOM_WORDS = ("dropout", "rand", "bernoulli", "multinomial", "normal", "uniform", "exponential")


class TraceError(Exception):
    """The forward cannot be written down as steps; the message says why. Never leaves this package."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """The steps of one forward. `results` has a node or a constant for each leaf of the output."""

    graph: fx.Graph
    spec: TreeSpec
    results: tuple[Any, ...]
    tracer: str
    constants: dict[str, Tensor] = field(default_factory=dict)

    @property
    def nodes(self) -> list[fx.Node]:
        """What runs, in order: layers and glue."""
        return [n for n in self.graph.nodes if n.op in ("call_module", "call_function", "call_method")]

    @property
    def inputs(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    @cached_property
    def outputs(self) -> list[fx.Node]:
        """The nodes among the results, each once."""
        return list(dict.fromkeys(r for r in self.results if isinstance(r, fx.Node)))

    def unflatten(self, values: Sequence[Any]) -> Any:
        """The model's output from the values of `outputs`."""
        if self.spec.is_leaf():
            return values[0]
        found = dict(zip(self.outputs, values, strict=True))
        leaves = [found[r] if isinstance(r, fx.Node) else r for r in self.results]
        return tree_unflatten(leaves, self.spec)

    def attribute(self, model: nn.Module, name: str) -> Tensor:
        """The parameter, buffer or constant that a get_attr node reads."""
        if name in self.constants:
            return self.constants[name]
        path, _, last = name.rpartition(".")
        return getattr(model.get_submodule(path), last)


def tidy(graph: fx.Graph) -> None:
    """Take out lookups that nobody uses; read sizes as soon as their tensor is there.

    A cut then carries the size and not the tensor it was read from.
    """
    last_input = [n for n in graph.nodes if n.op in ("placeholder", "get_attr")][-1]
    for node in reversed(graph.find_nodes(op="call_function", target=size_at)):
        owner = node.args[0]
        (last_input if owner.op in ("placeholder", "get_attr") else owner).append(node)
    for node in reversed(graph.nodes):
        idle = node.op == "get_attr" or (node.op == "call_function" and is_lookup(node))
        if idle and not node.users:
            graph.erase_node(node)


# Functions that appear in programs beside those of torch.


def size_at(tensor: Tensor, dim: int) -> int:
    """One size of a tensor, as a step of its own. Example: size_at of a 3×4 tensor at 1 is 4."""
    return tensor.shape[dim]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a layer's output, whatever holds them."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def without_gradient(value: Any) -> Any:
    """What was computed under torch.no_grad."""
    return tree_map_only(Tensor, Tensor.detach, value)


_LOOKUPS = {getattr, operator.getitem, size_at, tensors_in}
ARITHMETIC = {
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg,
    operator.truediv, operator.pow,
}  # fmt: skip


def is_lookup(node: fx.Node) -> bool:
    """True for a step without effect: it may go when nobody uses its result."""
    return node.target in _LOOKUPS or (node.target in ARITHMETIC and is_number(node))


def is_number(node: fx.Node) -> bool:
    """True for sizes and what is computed from them."""
    return node.meta.get("number", False)


def call_layers(inside: Callable[[nn.Module, tuple, dict], Any]) -> "_Patched":
    """While it is entered, every module is called through `inside(module, args, kwargs)`."""
    return _Patched(inside)


class _Patched:
    """Module calls go through a class attribute: it is replaced, as torch.fx does, and hooks still run."""

    def __init__(self, inside: Callable[[nn.Module, tuple, dict], Any]) -> None:
        self._inside = inside
        self.real = nn.Module.__call__

    def __enter__(self) -> "_Patched":
        inside = self._inside

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            return inside(module, args, kwargs)

        nn.Module.__call__ = __call__  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: Any) -> None:
        nn.Module.__call__ = self.real  # type: ignore[method-assign]


def plain_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors kept as plain attributes of modules, also in lists and dicts."""
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key.startswith("_") and key in _OF_MODULES:
                continue
            for number, leaf in enumerate(tree_leaves(value)):
                if isinstance(leaf, Tensor):
                    yield f"constant_{path}_{key}_{number}".replace(".", "_"), leaf


_OF_MODULES = set(vars(nn.Module()))


def is_stateless(module: nn.Module) -> bool:
    """True for a module with nothing inside: activation, dropout."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return not tensors and not any(True for _ in module.children())
