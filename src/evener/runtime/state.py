"""What one device holds of a job's state, as flat named tensors: what moves to other devices and into files.

    model/blocks.0.weight                      a parameter or buffer, under the user's own name
    optimizer/blocks.0.weight/exp_avg          a tensor that the optimiser keeps for it
    optimizer/blocks.0.weight/num_steps:int    a number that it keeps, as a tensor without dimensions

Options of parameter groups (learning rate, weight decay) are no state: they are functions of samples seen.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from evener.core.words import some
from evener.errors import ModelError, StateError

_NUMBERS = {"bool": (bool, torch.bool), "int": (int, torch.int64), "float": (float, torch.float64)}


def export_state(
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    names: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """The state of `parameters` (buffers may be among them), of those in `names` if given.

    Tensors are references to the live ones, numbers are copies. A tensor that is there under several names
    comes once, under the first. Raises ModelError for optimiser state that is neither tensor nor number.
    Example: SGD with momentum and one parameter "w" gives "model/w" and "optimizer/w/momentum_buffer".
    """
    result: dict[str, Tensor] = {}
    for name, p in _once(parameters).items():
        if names is not None and name not in names:
            continue
        result[f"model/{name}"] = p.detach()
        for key, value in optimizer.state.get(p, {}).items():
            if value is not None:
                word, tensor = _as_tensor(name, key, value)
                result[f"optimizer/{name}/{word}"] = tensor
    return result


def import_state(
    state: Mapping[str, Tensor], parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Make `parameters` and what `optimizer` keeps for them what `state` says; the inverse of `export_state`.

    Parameters, and optimiser tensors that exist, are filled in place. A parameter without optimiser state in
    `state` has none afterwards. Raises StateError that lists every name that is missing, too much, or of
    another shape or dtype; nothing has changed then.
    """
    first = _once(parameters)
    model, kept, surplus = _sorted_out(state, first)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name in [n for n in kept if id(first[n]) not in groups]:
        surplus += [f"optimizer/{name}/{key}" for key in kept.pop(name)]
    _check(model, kept, surplus, first, optimizer)
    with torch.no_grad():
        for name, p in first.items():
            p.copy_(model[name])
            if name in kept:
                _fill(optimizer.state[p], kept[name], p, groups[id(p)])
            else:
                optimizer.state.pop(p, None)


def owners(
    holders: Mapping[str, tuple[str, ...]], devices: Iterable[str], nbytes: Mapping[str, int]
) -> dict[str, str]:
    """Which of `devices` writes or sends each tensor: one of its holders, loads balanced by bytes.

    The largest goes first, to the holder with least so far; the same arguments give the same answer in every
    process. A tensor that none of `devices` holds is absent from the result.
    Example: owners({"a": ("x", "y"), "b": ("x", "y")}, ["x", "y"], {"a": 9, "b": 1}) is {"a": "x", "b": "y"}.
    """
    load = dict.fromkeys(devices, 0)
    order = {device: place for place, device in enumerate(load)}
    result = {}
    for name in sorted(holders, key=lambda n: (-nbytes[n], n)):
        able = [d for d in holders[name] if d in load]
        if able:
            owner = min(able, key=lambda d: (load[d], order[d]))
            load[owner] += nbytes[name]
            result[name] = owner
    return result


def _once(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor under the first of its names."""
    first = {id(p): name for name, p in reversed(list(parameters.items()))}
    return {name: p for name, p in parameters.items() if first[id(p)] == name}


def _as_tensor(name: str, key: Any, value: Any) -> tuple[str, Tensor]:
    if isinstance(key, str) and not {"/", ":"} & set(key):
        if isinstance(value, Tensor):
            return key, value.detach()
        for word, (kind, dtype) in _NUMBERS.items():  # bool first, which is an int too
            if isinstance(value, kind):
                return f"{key}:{word}", torch.tensor(value, dtype=dtype)
    raise ModelError(
        f"the optimiser keeps a {type(value).__name__} as {key!r} of {name}, which cannot be saved or sent",
        remedy="an optimiser whose state for a parameter is tensors and numbers",
    )


def _sorted_out(
    state: Mapping[str, Tensor], first: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], list[str]]:
    """(tensors by name, optimiser state by name and key, names that belong nowhere)."""
    model: dict[str, Tensor] = {}
    kept: dict[str, dict[str, Tensor]] = {}
    surplus = []
    for full, tensor in state.items():
        kind, _, rest = full.partition("/")
        name, _, key = rest.rpartition("/")
        if kind == "model" and rest in first:
            model[rest] = tensor
        elif kind == "optimizer" and name in first:
            kept.setdefault(name, {})[key] = tensor
        else:
            surplus.append(full)
    return model, kept, surplus


def _check(
    model: Mapping[str, Tensor],
    kept: Mapping[str, Mapping[str, Tensor]],
    surplus: list[str],
    first: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    missing = [f"model/{n}" for n in first if n not in model]
    other = [
        f"model/{n} {tuple(t.shape)} {t.dtype} for {tuple(first[n].shape)} {first[n].dtype}"
        for n, t in model.items()
        if t.shape != first[n].shape or t.dtype != first[n].dtype
    ]
    for name, values in kept.items():
        there = optimizer.state.get(first[name], {})
        known = {_as_tensor(name, k, v)[0] for k, v in there.items() if v is not None}
        if known:
            missing += [f"optimizer/{name}/{key}" for key in sorted(known - set(values))]
            surplus += [f"optimizer/{name}/{key}" for key in sorted(set(values) - known)]
    problems = {"missing": missing, "too much": surplus, "of another shape or dtype": other}
    if any(problems.values()):
        raise StateError(
            "this state is not that of the model and optimiser at hand",
            numbers="; ".join(f"{len(n)} {what}: {some(n, 8)}" for what, n in problems.items() if n),
            remedy="the same model and the same optimiser as the state was made with",
        )


def _fill(kept: dict[str, Any], values: Mapping[str, Tensor], p: Tensor, group: Mapping[str, Any]) -> None:
    for word, tensor in values.items():
        key, _, number = word.partition(":")
        if number in _NUMBERS:
            kept[key] = _NUMBERS[number][0](tensor.item())
            continue
        there = kept.get(key)
        if isinstance(there, Tensor) and there.shape == tensor.shape and there.dtype == tensor.dtype:
            there.copy_(tensor)
        else:
            kept[key] = _placed(tensor, key, p, group)


def _placed(tensor: Tensor, key: str, p: Tensor, group: Mapping[str, Any]) -> Tensor:
    """A copy where torch's optimisers want it: step counts on the host, unless the device reads them."""
    if key != "step":
        return tensor.detach().to(p.device, copy=True)
    if group.get("fused"):
        return tensor.detach().to(p.device, torch.float32, copy=True)
    return tensor.detach().to(p.device if group.get("capturable") else "cpu", copy=True)
