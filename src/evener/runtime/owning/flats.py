"""The flat buffer of a unit and the user's parameters as views of it."""

import torch
from torch import Tensor, nn

from evener.runtime.owning.units import Unit

_NOTHING = float("nan")  # what a parameter is while its values are elsewhere: nobody reads it unnoticed


def put(p: nn.Parameter, values: Tensor) -> None:
    """Make `values` those of `p`, of whichever device: `p` stays the same object."""
    if p.device == values.device or not torch.__future__.get_swap_module_params_on_conversion():
        p.data = values
    else:
        torch.utils.swap_tensors(p, nn.Parameter(values, requires_grad=p.requires_grad))


def views(unit: Unit, flat: Tensor) -> None:
    """Make the unit's parameters views of `flat`."""
    for _, p, (start, end) in unit.places():
        put(p, flat[start:end].view(p.shape))


def hide(unit: Unit, device: torch.device) -> None:
    """The unit's parameters have their shapes and no values: NaN in one place of memory."""
    nothing = torch.full((1,), _NOTHING, dtype=unit.dtype, device=device)
    for p in unit.named.values():
        put(p, nothing.expand(p.shape))


def laid_end_to_end(unit: Unit, device: torch.device) -> Tensor:
    """A new flat buffer with the values of the unit's parameters."""
    flat = torch.empty(unit.count, dtype=unit.dtype, device=device)
    with torch.no_grad():
        for _, p, (start, end) in unit.places():
            flat[start:end].copy_(p.detach().reshape(-1))
    return flat


def let_go(flat: Tensor) -> None:
    """Give the buffer's memory back; what autograd kept of it finds it again after `take_back`."""
    flat.untyped_storage().resize_(0)


def take_back(flat: Tensor) -> None:
    """Give the buffer memory again, without values."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())
