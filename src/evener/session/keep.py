"""What a run leaves of its tensors: safetensors files under the user's own parameter names."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

GRADIENT_FILE = "first_gradient.safetensors"
PARAMETER_FILE = "model.safetensors"


def keep_first_gradient(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write the gradients that the optimiser's first step will use, just before it does."""

    def write(*_) -> None:
        handle.remove()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        save_file({n: g.detach().cpu().contiguous() for n, g in grads.items()}, folder / GRADIENT_FILE)

    handle = optimizer.register_step_pre_hook(write)


def save_parameters(model: nn.Module, folder: Path) -> Path:
    """Write parameters and buffers, each shared tensor once, under the names of `named_parameters`."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    path = folder / PARAMETER_FILE
    save_file({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}, path)
    return path
