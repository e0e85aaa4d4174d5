"""What a loop of one's own keeps beside tensors, as JSON: options of groups, a scheduler's numbers."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from evener.errors import StateError, UsageError

_PAIRS, _FLOAT = "pairs of a mapping", "a number"


def options_of(optimizer: torch.optim.Optimizer, scheduler: Any = None) -> dict[str, Any]:
    """The options of each parameter group, and the scheduler's `state_dict`.

    UsageError for a scheduler that keeps more than numbers, words and collections of them.
    """
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    result: dict[str, Any] = {"groups": _to_json(groups, "the optimiser's groups")}
    if scheduler is not None:
        # `prepare` puts a step of its own into the scheduler, which is no state of it.
        state = {k: v for k, v in scheduler.state_dict().items() if not callable(v)}
        result["scheduler"] = _to_json(state, type(scheduler).__name__)
    return result


def check_options(options: Mapping[str, Any], optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """StateError where there are more or fewer groups, or where a scheduler is at hand and none was saved."""
    if scheduler is not None and "scheduler" not in options:
        raise StateError(
            "no learning-rate scheduler was saved with this checkpoint",
            remedy="load_checkpoint without scheduler; save_checkpoint(…, scheduler=…) saves one",
        )
    groups = options.get("groups", [])
    if groups and len(groups) != len(optimizer.param_groups):
        raise StateError(
            "the optimiser has another number of parameter groups than the checkpoint",
            numbers=f"{len(groups)} there, {len(optimizer.param_groups)} here",
            remedy="the same groups as it was saved with",
        )


def set_options(options: Mapping[str, Any], optimizer: torch.optim.Optimizer, scheduler: Any = None) -> None:
    """Give groups and scheduler what `options_of` found; StateError as `check_options`, before any change."""
    check_options(options, optimizer, scheduler)
    groups = _from_json(options.get("groups", []))
    for group, saved in zip(optimizer.param_groups, groups, strict=False):
        for key, value in saved.items():
            there = group.get(key)
            if isinstance(there, torch.Tensor):
                there.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(there, tuple) else value
    if scheduler is not None:
        scheduler.load_state_dict(_from_json(options["scheduler"]))


def _to_json(value: Any, where: str) -> Any:
    """`value` in what JSON has; mappings with other keys than words, and infinities, are marked."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_to_json(v, where) for v in value]
    if isinstance(value, Mapping):
        if all(isinstance(k, str) for k in value):
            return {k: _to_json(v, f"{where}.{k}") for k, v in value.items()}
        return {_PAIRS: [[_to_json(k, where), _to_json(v, f"{where}.{k}")] for k, v in value.items()]}
    raise UsageError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold",
        remedy="a scheduler that keeps numbers; with functions of its own LambdaLR keeps none of them",
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(v) for v in value]
    if isinstance(value, dict):
        if set(value) == {_FLOAT}:
            return float(value[_FLOAT])
        if set(value) == {_PAIRS}:
            return {_from_json(k): _from_json(v) for k, v in value[_PAIRS]}
        return {k: _from_json(v) for k, v in value.items()}
    return value
