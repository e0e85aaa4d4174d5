"""The user's optimiser over pieces of parameters: made over whole ones, so that its groups are the user's.

    made with     weight (10 x 4)           groups by name, shape or size come out as in plain PyTorch
    moves         weight's values 20 .. 31  of this device, with state for them alone

Whether that is the same mathematics is tried, group by group: an optimiser that looks at a whole matrix
(Muon, Adafactor, LAMB) ends elsewhere on pieces, and gets its parameters whole.
"""

import copy
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

_SHAPE = (160, 136)  # beyond the smallest sizes from which optimisers factor or pack: 128, 4096
_CUTS = (0, 7001, 15000, 160 * 136)
_STEPS = 3
_ROUNDING = 1e-6

Pieces = Mapping[nn.Parameter, nn.Parameter]


def cannot_cut(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters of those groups in which `optimizer` ends elsewhere on pieces than on the whole.

    Example: none for AdamW; for torch's Muon all, as it takes matrices only.
    """
    return [
        p
        for group in optimizer.param_groups
        if not _is_elementwise(optimizer, group)
        for p in group["params"]
    ]


def over_pieces(optimizer: torch.optim.Optimizer, pieces: Pieces, starts: Mapping[nn.Parameter, int]) -> None:
    """Make `optimizer`, which has not moved yet, move `pieces` in place of the parameters they are of.

    Parameters without a piece are no longer its. State that it made beforehand is cut alike: `starts` says
    where in its parameter each piece begins.
    """
    for group in optimizer.param_groups:
        group["params"] = [pieces[p] for p in group["params"] if p in pieces]
    made = dict(optimizer.state)
    optimizer.state.clear()
    for p, kept in made.items():
        if isinstance(p, nn.Parameter) and p in pieces:
            piece, start = pieces[p], starts[p]
            optimizer.state[piece] = {key: cut(value, p, piece, start) for key, value in kept.items()}


def cut(value: object, p: Tensor, piece: Tensor, start: int) -> object:
    """What a piece keeps of a parameter's state: its values where these are as many, else all of it."""
    if not isinstance(value, Tensor) or piece.shape == p.shape or value.shape != p.shape:
        return value
    return value.reshape(-1)[start : start + piece.numel()].to(piece.device, copy=True)


def trial_of(
    optimizer: torch.optim.Optimizer, group: dict, states: Mapping[nn.Parameter, dict]
) -> torch.optim.Optimizer:
    """A copy of `optimizer` with `group` alone, the `states` of its parameters, and nobody who listens."""
    trial = copy.copy(optimizer)
    trial.param_groups = [group]
    trial.state = defaultdict(dict, {p: state for p, state in states.items() if state})
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(trial, name, OrderedDict())
    return trial


def started(optimizer: torch.optim.Optimizer, group: dict, values: Tensor) -> dict:
    """State as `optimizer` makes it before its first step for a parameter of `group`, for these `values`."""
    like, born = next(((p, s) for p in group["params"] for s in [optimizer.state.get(p)] if s), (None, None))
    if born is None or like is None:
        return {}
    return {
        key: torch.full_like(values, float(v.reshape(-1)[0]))
        if isinstance(v, Tensor) and v.shape == like.shape and v.numel() > 1
        else copy.deepcopy(v)
        for key, v in born.items()
    }


def _is_elementwise(optimizer: torch.optim.Optimizer, group: dict) -> bool:
    generator = torch.Generator().manual_seed(0)
    dtype = next((p.dtype for p in group["params"]), torch.float32)
    values = torch.randn(_SHAPE, generator=generator).to(dtype)
    gradients = [torch.randn(_SHAPE, generator=generator).to(dtype) for _ in range(_STEPS)]
    with torch.random.fork_rng(devices=[]):
        try:
            whole = _moved(optimizer, group, values, gradients, started(optimizer, group, values))
            parts = [
                _moved(
                    optimizer,
                    group,
                    values.reshape(-1)[a:b],
                    [g.reshape(-1)[a:b] for g in gradients],
                    started(optimizer, group, values.reshape(-1)[a:b]),
                )
                for a, b in itertools.pairwise(_CUTS)
            ]
        except Exception:  # whatever it minds about a piece: it shall not get any
            return False
    moved = (whole - values).norm()
    return bool((torch.cat(parts) - whole.reshape(-1)).norm() <= _ROUNDING * moved)


def _moved(
    optimizer: torch.optim.Optimizer, group: dict, values: Tensor, gradients: Sequence[Tensor], state: dict
) -> Tensor:
    """Where a copy of `optimizer` takes `values` in a few steps."""
    torch.manual_seed(0)
    p = nn.Parameter(values.clone())
    trial = trial_of(optimizer, {**group, "params": [p]}, {p: state})
    for gradient in gradients:
        p.grad = gradient.clone()
        trial.step()
    return p.detach()
