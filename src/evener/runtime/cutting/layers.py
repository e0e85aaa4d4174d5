"""Lists of layer names against a model: is every name known, and everything placed exactly once?"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from evener.core.layers import ROOT, find_layers
from evener.core.words import counted
from evener.errors import PlanMismatchError, UnknownNameError


def layer_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the layers of `model` in the order of their definition, see `core.layers.find_layers`."""
    return tuple(layer.name for layer in find_layers(model))


def tensor_names(model: nn.Module) -> dict[int, str]:
    """id → first name of each parameter and buffer."""
    return {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layers by stage. `modules` has those that run as a whole; the others only hold tensors.

    `order` is the order of the lists, `stage_of` the stage of each layer.
    """

    order: tuple[str, ...]
    stage_of: dict[str, int]
    modules: dict[str, nn.Module]
    num_stages: int

    def tensors_of(self, model: nn.Module, layer: str) -> dict[str, torch.Tensor]:
        """Full name → parameter or buffer of `layer`."""
        path = "" if layer == ROOT else layer
        whole = layer in self.modules
        module = model.get_submodule(path)
        parts = [
            *module.named_parameters(path, recurse=whole, remove_duplicate=False),
            *module.named_buffers(path, recurse=whole, remove_duplicate=False),
        ]
        return dict(parts)


def layout_of(model: nn.Module, stages: Sequence[Sequence[str]]) -> Layout:
    """`stages` checked against `model`: every name known and used once, every parameter and buffer placed.

    A name that stands beside names below it (`h.1` beside `h.1.attn`) stands for the tensors that hang on it
    directly. Errors: PlanMismatchError (a stage without layers, a layer twice or missing), UnknownNameError.
    """
    if not stages:
        raise PlanMismatchError("a cut needs at least one stage", remedy=_wanted(model))
    first_name = {id(m): name for name, m in model.named_modules()}
    known = {name: first_name[id(m)] for name, m in model.named_modules(remove_duplicate=False)}
    stage_of: dict[str, int] = {}
    for number, names in enumerate(stages):
        if not names:
            raise PlanMismatchError(
                f"stage {number} is empty",
                numbers=f"{counted(len(stages), 'stage')}",
                remedy=f"fewer stages, or a layer for it; {_wanted(model)}",
            )
        for given in names:
            if given != ROOT and (given not in known or given == ""):
                raise _unknown(model, given, known)
            name = ROOT if given == ROOT else known[given]
            if name in stage_of:
                also = "" if name == given else f" (another name of {name!r})"
                raise PlanMismatchError(
                    f"layer {given!r}{also} is named twice",
                    numbers=f"stages {stage_of[name]} and {number}",
                    remedy="each layer belongs to one stage; tied weights are found without being named",
                )
            stage_of[name] = number
    layout = Layout(
        order=tuple(stage_of),
        stage_of=stage_of,
        modules={n: model.get_submodule(n) for n in stage_of if _runs(n, stage_of)},
        num_stages=len(stages),
    )
    _check_callable(model, layout)
    _check_complete(model, layout)
    return layout


def _runs(name: str, names: dict[str, int]) -> bool:
    return name != ROOT and not any(other.startswith(f"{name}.") for other in names)


def _check_callable(model: nn.Module, layout: Layout) -> None:
    for name, module in layout.modules.items():
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and len(module):
            inside = ", ".join(f"{name}.{child}" for child, _ in module.named_children())
            raise PlanMismatchError(
                f"{name!r} is a list of layers, not a layer", remedy=f"name what is in it: {inside}"
            )


def _check_complete(model: nn.Module, layout: Layout) -> None:
    placed = {id(t) for layer in layout.order for t in layout.tensors_of(model, layer).values()}
    missing = [name for key, name in tensor_names(model).items() if key not in placed]
    if missing:
        wanted = [n for n in layer_names(model) if n not in layout.stage_of]
        owners = [n for n in wanted if any(m.startswith(f"{n}.") or n == ROOT for m in missing)]
        raise PlanMismatchError(
            f"no stage holds {', '.join(owners or missing)}",
            numbers=f"{len(missing)} parameters and buffers without a place, the first is {missing[0]}",
            remedy="add the layer to a stage; " + _wanted(model),
        )


def _unknown(model: nn.Module, name: str, known: dict[str, str]) -> UnknownNameError:
    near = difflib.get_close_matches(name, [*known, ROOT], n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return UnknownNameError(f"the model has no layer {name!r}", remedy=hint + _wanted(model))


def _wanted(model: nn.Module) -> str:
    names = layer_names(model)
    shown = ", ".join(names[:40]) + (f", and {len(names) - 40} more" if len(names) > 40 else "")
    return f"the model's layers are {shown}"
