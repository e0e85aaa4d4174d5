"""What a run leaves of its tensors: safetensors files under the user's own parameter names."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

GRADIENT_FILE = "first_gradient-{}.safetensors"
PARAMETER_FILE = "model.safetensors"


def keep_first_gradient(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, folder: Path, number: int
) -> None:
    """Write this device's gradients that the optimiser's first step will use, just before it does."""

    def write(*_) -> None:
        handle.remove()
        grads = {n: p.grad.detach().cpu() for n, p in parameters.items() if p.grad is not None}
        path = folder / GRADIENT_FILE.format(number)
        save_file({n: g.contiguous().clone() for n, g in grads.items()}, path)

    handle = optimizer.register_step_pre_hook(write)


def first_gradients(folder: Path) -> list[dict[str, torch.Tensor]]:
    """The gradients that the devices of a run kept, one dictionary for each."""
    return [load_file(path) for path in sorted(folder.glob(GRADIENT_FILE.format("*")))]


def save_parameters(model: nn.Module, folder: Path) -> Path:
    """Write parameters and buffers, each shared tensor once, under the names of `named_parameters`."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    path = folder / PARAMETER_FILE
    save_file({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}, path)
    return path
