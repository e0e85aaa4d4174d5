"""Keeping copies of one model alike: the same start, the same buffers, and numbers that prove it."""

import hashlib
from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import nn

from evener.core.seams import Wire
from evener.runtime.ranks import PATIENCE, Ranks
from evener.runtime.raw import raw


def spread_state(model: nn.Module) -> None:
    """Give every device the parameters and buffers of the group's first device."""
    for tensor in [*model.parameters(), *model.buffers()]:
        host = tensor.detach().cpu().contiguous()  # Gloo sends memory as it lies, whatever the strides
        dist.broadcast(host, src=0)
        tensor.detach().copy_(host)


def average_buffers(
    model: nn.Module, parts: Mapping[str, float], wire: Wire, *, without: Collection[str] = ()
) -> None:
    """Make floating buffers (BatchNorm statistics) their mean over their holders, weighted by samples.

    `parts` is this device's part of the samples for each buffer it holds; over all holders they sum to 1.
    The buffers of layers in `without` are left alone.
    Whole-number buffers are left as they are: BatchNorm's count alike everywhere.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and name.rpartition(".")[0] not in without:
            part, mean = parts.get(name, 0.0), torch.zeros(buffer.shape, dtype=torch.float64)
            if part:  # nothing at all of a buffer with part 0: -inf · 0 of a mask would be NaN
                mean.copy_(buffer.detach()).mul_(part)
            wire.all_reduce(mean, f"buffer {name}").wait()
            buffer.detach().copy_(mean)


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """A short hash of each tensor, bit by bit: equal on two devices means equal tensors."""
    return {
        name: hashlib.blake2b(raw(t.detach().cpu().contiguous()).numpy().tobytes(), digest_size=8).hexdigest()
        for name, t in tensors.items()
    }


def collect(model: nn.Module, holders: Mapping[str, tuple[str, ...]], ranks: Ranks) -> None:
    """Bring every parameter and buffer of `model` to the leading device, each from its first holder."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    leader = ranks.devices[0]
    for name, tensor in tensors.items():
        owners = holders.get(name, (leader,))
        if leader in owners:
            continue
        if ranks.here == owners[0]:
            _wait(dist.isend(tensor.detach().cpu().contiguous(), dst=0))
        elif ranks.here == leader:
            host = torch.empty(tensor.shape, dtype=tensor.dtype)
            _wait(dist.irecv(host, src=ranks.devices.index(owners[0])))
            tensor.detach().copy_(host)


def _wait(work: dist.Work | None) -> None:
    assert work is not None, "every device of a job is in its group"
    work.wait(PATIENCE)
