"""What a device owns, as named tensors for checkpoints, and back: whatever owners wrote them."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from evener.runtime.checkpoints.values import piece_name
from evener.runtime.owning.optimizer import cut
from evener.runtime.owning.owned import Owned, Piece
from evener.runtime.state import export_state, import_state

Read = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Names of parameters → their state, whole: `model/NAME`, `optimizer/NAME/KEY`."""


def export_owned(owned: Owned) -> dict[str, Tensor]:
    """This device's part: references to live tensors, numbers as copies.

    What a device owns all of has its plain name. Example: values 20 to 31 of a weight of 10 x 4 under AdamW
    are three tensors of 12 values; the step comes from the owner of the first value.
    """
    found: dict[str, Tensor] = {}
    for piece in (p for held in owned.pieces.values() for p in held):
        shape = piece.whole.shape
        for name, tensor in export_state({piece.name: piece.values}, owned.optimizer).items():
            if piece.is_all:
                found[name] = tensor
            elif tensor.shape == piece.values.shape:
                found[piece_name(name, shape, piece.start, piece.start + len(tensor))] = tensor
            elif piece.start == 0:
                found[name] = tensor
    return found


def import_owned(owned: Owned, read: Read) -> None:
    """Make this device's part what `read` says, a unit at a time.

    Raises StateError as `import_state` does; what came before stays changed then.
    """
    for unit in owned.units:
        state = read(list(unit.named))
        with torch.no_grad():
            for name, p in unit.named.items():
                if owned.held != "parameters":
                    p.copy_(state[f"model/{name}"])
        for piece in owned.pieces[unit.number]:
            import_state(_part(piece, state), {piece.name: piece.values}, owned.optimizer)
    owned.parameters.restored()


def _part(piece: Piece, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of the whole state of a parameter, that of its piece."""
    mine = {}
    for name, tensor in state.items():
        if name == f"model/{piece.name}" or name.startswith(f"optimizer/{piece.name}/"):
            mine[name] = cut(tensor, piece.whole, piece.values, piece.start)
    return mine  # type: ignore[return-value]  # a tensor is cut to a tensor
