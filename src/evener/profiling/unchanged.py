"""Everything measured is put back: parameters, gradients, buffers and the states of random numbers."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def left_unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, `model` has no gradients and may be trained; afterwards it is bit for bit what it was.

    Holds a copy of parameters and buffers in host memory. Python's, numpy's and torch's random states are put
    back as well.
    """
    params = [(p, p.detach().to("cpu", copy=True), p.grad) for p in model.parameters()]
    buffers = [
        (module, name, tensor, tensor.detach().to("cpu", copy=True))
        for module in model.modules()
        for name, tensor in module.named_buffers(recurse=False)
    ]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    indices = [] if device.type == "cpu" else [device.index or 0]
    kind = {} if device.type == "cpu" else {"device_type": device.type}
    try:
        for p, _, _ in params:
            p.grad = None
        with torch.random.fork_rng(devices=indices, **kind):
            yield
    finally:
        with torch.no_grad():
            for p, before, grad in params:
                p.copy_(before)
                p.grad = grad
            for module, name, tensor, before in buffers:
                tensor.copy_(before)
                module._buffers[name] = tensor
        random.setstate(python_state)
        np.random.set_state(numpy_state)
