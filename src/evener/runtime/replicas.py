"""Keeping copies of one model alike: the same start, the same buffers, and a number that proves it."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from evener.core.seams import Wire


def spread_state(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give every device the parameters and buffers of the group's first device."""
    for tensor in [*model.parameters(), *model.buffers()]:
        host = tensor.detach().cpu()
        dist.broadcast(host, src=0, group=group)
        tensor.detach().copy_(host)


def average_buffers(model: nn.Module, part: float, wire: Wire) -> None:
    """Make floating buffers (BatchNorm statistics) their mean over devices, each weighted by its `part`.

    The parts of all devices sum to 1. Whole-number buffers are left as they are: every device counts alike.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            mean = buffer.detach().to("cpu", torch.float64) * part
            wire.all_reduce(mean, f"buffer {name}").wait()
            buffer.detach().copy_(mean)


def checksum(model: nn.Module) -> str:
    """A short hash of all parameters, bit by bit: equal on two devices means equal models."""
    digest = hashlib.blake2b(digest_size=8)
    for p in model.parameters():
        digest.update(p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
