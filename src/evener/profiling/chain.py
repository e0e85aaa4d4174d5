"""The layers of a model: what can be placed, by fully qualified name, and which of them share parameters.

GPT                        embed            Embedding, its matrix also head's     tied to head
 ├─ embed                  blocks.0         containers are opened
 ├─ blocks (ModuleList)    blocks.1
 │   ├─ 0, 1               head
 └─ head                   (root)           parameters that hang on the model itself
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

ROOT = "(root)"


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """One layer: the module that runs it (None where there are only parameters) and what it holds."""

    name: str
    module: nn.Module | None
    params: tuple[nn.Parameter, ...]
    buffers: tuple[torch.Tensor, ...]

    @property
    def param_bytes(self) -> int:
        return sum(p.nbytes for p in self.params)


def chain_of(model: nn.Module) -> tuple[Piece, ...]:
    """The layers of `model` in the order of their definition.

    Sequential, ModuleList and ModuleDict are opened, again and again; every other child of the model or of an
    opened container is a layer. Parameters and buffers that a model or container holds itself become a layer
    of its name ("(root)" for the model). A model without children is one layer.
    """
    return tuple(_visit(model, "", set()))


def _visit(module: nn.Module, name: str, seen: set[int]) -> Iterator[Piece]:
    if id(module) in seen:
        return  # one module under two names is one layer
    seen.add(id(module))
    if name and not _is_container(module):
        yield Piece(
            name=name, module=module, params=tuple(module.parameters()), buffers=tuple(module.buffers())
        )
        return
    children = list(module.named_children())
    params, buffers = tuple(module.parameters(recurse=False)), tuple(module.buffers(recurse=False))
    if params or buffers or not children:
        runs = None if children else module
        yield Piece(name=name or ROOT, module=runs, params=params, buffers=buffers)
    for child_name, child in children:
        yield from _visit(child, f"{name}.{child_name}" if name else child_name, seen)


def _is_container(module: nn.Module) -> bool:
    if isinstance(module, nn.Sequential):  # a subclass may do more in forward than run its children
        return type(module).forward is nn.Sequential.forward
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def storage_of(tensor: torch.Tensor) -> tuple[torch.device, int]:
    """What two tensors have in common exactly when they share memory."""
    return tensor.device, tensor.untyped_storage().data_ptr()


def ties(pieces: tuple[Piece, ...]) -> dict[str, tuple[str, ...]]:
    """For each layer the names of the others that share a parameter's storage with it."""
    holders: dict[tuple[torch.device, int], list[str]] = {}
    for piece in pieces:
        for key in {storage_of(p) for p in piece.params if p.numel()}:
            holders.setdefault(key, []).append(piece.name)
    tied: dict[str, tuple[str, ...]] = {}
    for piece in pieces:
        others = (n for names in holders.values() if piece.name in names for n in names if n != piece.name)
        tied[piece.name] = tuple(dict.fromkeys(others))
    return tied
