"""Whether an optimiser's state can be that of a class: what torch's own keep is found by asking them."""

import inspect
from collections.abc import Collection

import torch
from torch import nn

from evener.core.words import some
from evener.errors import UsageError

_MORE = {"amsgrad": True, "centered": True, "momentum": 0.5}
"""Options with which a class keeps more than without."""
_SHAPES = ((2, 2), (2,))


def check_class(name: str, kept: Collection[str]) -> str:
    """UsageError where `name` is an optimiser of torch's that never keeps `kept`, or is in other letters.

    A sentence where nothing is known of the class, else "".
    Example: ("SGD", {"exp_avg", "exp_avg_sq", "step"}) is refused; Adam, AdamW and RAdam would keep that.
    """
    known = {n: kind for n, kind in vars(torch.optim).items() if _is_optimizer(kind)}
    alike = [n for n in known if n.casefold() == name.casefold() and n != name]
    if alike:
        raise UsageError(f"{name} is no class of torch's, {alike[0]} is", remedy=f"--optimizer {alike[0]}")
    keeps = _kept_by(known[name]) if name in known else []
    told = some(sorted(kept), 8)
    if not keeps:
        return f"whether {name} keeps {told} is not known here: it shows when the run goes on"
    if not _fits(kept, keeps):
        fitting = [n for n, kind in known.items() if _fits(kept, _kept_by(kind))]
        raise UsageError(
            f"the state is not that of {name}",
            numbers=f"it has {told}; {name} keeps {some(sorted(keeps[0]), 8) or 'nothing'}",
            remedy=f"--optimizer with one of {', '.join(fitting)}" if fitting else "the class that wrote it",
        )
    return ""


def _is_optimizer(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)


def _fits(kept: Collection[str], keeps: list[set[str]]) -> bool:
    """Whether `kept` has what is always kept, and nothing that never is."""
    return bool(keeps) and set.intersection(*keeps) <= set(kept) <= set.union(*keeps)


def _kept_by(kind: type[torch.optim.Optimizer]) -> list[set[str]]:
    """The names of what `kind` keeps for a matrix and a vector, without and with each of `_MORE`.

    Empty where it cannot be asked, as one that wants a closure or sparse gradients.
    """
    taken = inspect.signature(kind).parameters
    options = [{}, *({n: value} for n, value in _MORE.items() if n in taken)]
    found = []
    for shape, chosen in ((s, o) for s in _SHAPES for o in options):
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = torch.zeros(shape)
        try:
            optimizer = kind([weight], **chosen)  # type: ignore[arg-type]
            optimizer.step()
        except Exception:  # Muon takes matrices only
            continue
        found.append({k for k, v in optimizer.state[weight].items() if v is not None})
    return found
