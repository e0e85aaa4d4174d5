"""The layers of a model with what they hold, and which of them share parameters."""

from dataclasses import dataclass

import torch
from torch import nn

from evener.core.layers import FoundLayer, find_layers


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
    """The layers of `model` in the order of their definition; the rule is `core.layers.find_layers`."""
    return tuple(_piece(found) for found in find_layers(model))


def _piece(found: FoundLayer) -> Piece:
    module, whole = found.module, found.whole
    return Piece(
        name=found.name,
        module=module if whole else None,
        params=tuple(module.parameters(recurse=whole)),
        buffers=tuple(module.buffers(recurse=whole)),
    )


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
