"""Everything measured is put back: parameters, gradients, buffers and the states of random numbers."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def left_unchanged(model: nn.Module, device: torch.device) -> Iterator[Callable[[], tuple[str, ...]]]:
    """Inside, `model` has no gradients and may be trained; afterwards it is bit for bit what it was.

    Gives a function that names the buffers, but for BatchNorm's, whose bits have changed inside so far.
    Holds a copy of parameters and buffers in host memory. Python's, numpy's and torch's random states are put
    back as well.
    """
    params = [(p, p.detach().to("cpu", copy=True), p.grad) for p in model.parameters()]
    buffers = [
        (path, module, name, tensor, tensor.detach().to("cpu", copy=True))
        for path, module in model.named_modules()
        for name, tensor in module.named_buffers(recurse=False)
    ]

    def changed() -> tuple[str, ...]:
        found = []
        for path, module, name, _, before in buffers:
            now = module._buffers.get(name)
            if isinstance(module, _BatchNorm):
                continue
            if now is None or not torch.equal(_bits(now), _bits(before)):
                found.append(f"{path}.{name}".removeprefix("."))
        return tuple(found)

    python_state, numpy_state = random.getstate(), np.random.get_state()
    indices = [] if device.type == "cpu" else [device.index or 0]
    kind = {} if device.type == "cpu" else {"device_type": device.type}
    try:
        for p, _, _ in params:
            p.grad = None
        with torch.random.fork_rng(devices=indices, **kind):
            yield changed
    finally:
        with torch.no_grad():
            for p, before, grad in params:
                p.copy_(before)
                p.grad = grad
            for _, module, name, tensor, before in buffers:
                tensor.copy_(before)
                module._buffers[name] = tensor
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    own = dense.cpu().contiguous()
    # A tensor of one value is contiguous whatever its stride, which reshape(-1) keeps.
    return own.as_strided((own.numel(),), (1,)).view(torch.uint8)
