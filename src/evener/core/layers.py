"""Which parts of a model are its layers: one rule for measuring, planning and cutting, without torch.

GPT                        embed
 ├─ embed                  blocks.0        containers are opened
 ├─ blocks (ModuleList)    blocks.1
 │   ├─ 0, 1               head
 └─ head                   (root)          tensors that hang on the model itself
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROOT = "(root)"
_CONTAINERS = {"Sequential", "ModuleList", "ModuleDict"}
_HOME = "torch.nn.modules.container"


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundLayer:
    """A layer: the module of that name, as a whole or else only the tensors that hang on it itself."""

    name: str
    module: Any
    whole: bool


def find_layers(model: Any) -> tuple[FoundLayer, ...]:
    """The layers of `model` (a torch module) in the order of their definition.

    Sequential, ModuleList and ModuleDict are opened again and again; every other child of the model or of an
    opened container is a layer. One with a forward of its own stays whole. Tensors that a model or container
    holds itself are a layer of its name, "(root)" for the model. A Hugging Face model says in
    `_no_split_modules` which modules are its blocks: what wraps blocks is opened too. A module under two
    names is one layer. Example: a byte transformer gives (root), embed, blocks.0, blocks.1, norm, head.
    """
    return tuple(_visit(model, "", set(), set(getattr(model, "_no_split_modules", None) or ())))


def run_order(names: Sequence[str], first_use: Mapping[str, int]) -> list[str]:
    """`names` by first use; a name that is never used stays beside the name before it.

    Example: a, b, c of which b is used first, then a: b, c, a; of which a and c are used: a, b, c.
    """
    at, keyed = -1, []
    for i, name in enumerate(names):
        at = first_use.get(name, at)
        keyed.append((at, i, name))
    return [name for _, _, name in sorted(keyed)]


def _visit(module: Any, name: str, seen: set[int], blocks: set[str]) -> Iterator[FoundLayer]:
    if id(module) in seen:
        return
    seen.add(id(module))
    if name and not (_is_container(module) or _wraps(module, blocks)):
        yield FoundLayer(name=name, module=module, whole=True)
        return
    children = list(module.named_children())
    if not children or _holds_tensors(module):
        yield FoundLayer(name=name or ROOT, module=module, whole=not children)
    for child_name, child in children:
        yield from _visit(child, f"{name}.{child_name}" if name else child_name, seen, blocks)


def _is_container(module: Any) -> bool:
    for kind in type(module).__mro__:
        if kind.__name__ in _CONTAINERS and kind.__module__ == _HOME:
            # A subclass with a forward of its own may do more than run its children.
            return getattr(type(module), "forward", None) is getattr(kind, "forward", None)
    return False


def _wraps(module: Any, blocks: set[str]) -> bool:
    if type(module).__name__ in blocks:
        return False
    return any(type(child).__name__ in blocks for child in module.modules())


def _holds_tensors(module: Any) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return bool(own)
