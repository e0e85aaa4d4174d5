"""What a run leaves of its tensors: safetensors files under the user's own parameter names."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from evener.core.files import readable
from evener.core.words import some
from evener.errors import FileError

GRADIENT_FILE = "first_gradient-{}.safetensors"
PARAMETER_FILE = "model.safetensors"


def keep_first_gradient(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    folder: Path,
    number: int,
    more: Callable[[], Mapping[str, torch.Tensor]] = dict,
) -> None:
    """Write this device's gradients that the optimiser's first step will use, just before it does.

    `more()` gives those that no parameter has: tables'.
    """

    def write(*_) -> None:
        handle.remove()
        grads = {n: p.grad.detach().cpu() for n, p in parameters.items() if p.grad is not None}
        grads.update(more())
        path = folder / GRADIENT_FILE.format(number)
        save_file({n: g.contiguous().clone() for n, g in grads.items()}, path)

    handle = optimizer.register_step_pre_hook(write)


def drop_first_gradients(folder: Path) -> None:
    """Remove what an earlier run, of other devices perhaps, kept in the same folder."""
    for path in folder.glob(GRADIENT_FILE.format("*")):
        path.unlink(missing_ok=True)


def first_gradients(folder: Path) -> list[dict[str, torch.Tensor]]:
    """The gradients that the devices of a run kept, one dictionary for each."""
    return [load_file(path) for path in sorted(folder.glob(GRADIENT_FILE.format("*")))]


def save_parameters(model: nn.Module, folder: Path) -> Path:
    """Write what `state_dict` has, each shared tensor once, under the names of `named_parameters`.

    `safetensors.torch.load_model(model, path)` reads it in plain PyTorch, tied weights included. Whole or not
    at all: FileError where it finds no room.
    """
    tensors = {n: t.detach().cpu().contiguous().clone() for n, t in saved_tensors(model).items()}
    path = folder / PARAMETER_FILE
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, partial, metadata={"format": "pt"})  # transformers reads no file without it
        readable(partial)
        os.replace(partial, path)
    except (OSError, SafetensorError) as e:
        partial.unlink(missing_ok=True)
        raise FileError(f"cannot write {path}: {e}", remedy="a folder with room that you may write to") from e
    return path


def saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by the first of their names; none that has no values (a table)."""
    kept = model.state_dict()
    every = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor for name, tensor in every.items() if name in kept and not tensor.is_meta}


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Copy the tensors of a safetensors file, or of a run's folder, into `model`, under any plan's names.

    A tied weight may stand under any of its names, or several. FileError when a name is missing or too much,
    or a shape is another; the model is then left as it was.
    """
    path = Path(path)
    path = path / PARAMETER_FILE if path.is_dir() else path
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as e:
        raise FileError(
            f"cannot read weights from {path}: {e}",
            remedy=f"the folder of a run that has ended (its {PARAMETER_FILE} is written last), or a "
            "safetensors file",
        ) from e
    wanted = saved_tensors(model)
    first = {id(t): name for name, t in wanted.items()}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = {name: first[id(t)] for name, t in named if id(t) in first}
    given = {names[n]: t for n, t in found.items() if n in names}
    problems = {
        "missing": [n for n in wanted if n not in given],
        "unexpected": [n for n in found if n not in names],
        "of another shape": [
            f"{n} {tuple(t.shape)} for {tuple(wanted[n].shape)}"
            for n, t in given.items()
            if t.shape != wanted[n].shape
        ],
    }
    if any(problems.values()):
        listed = [f"{len(n)} {what}: {some(n, 8)}" for what, n in problems.items() if n]
        raise FileError(
            f"{path} does not hold the weights of {type(model).__name__}",
            numbers="; ".join(listed),
            remedy="weights of the same model; load a part of a model in recipe(), where you choose what",
        )
    with torch.no_grad():
        for name, tensor in given.items():
            wanted[name].copy_(tensor)
