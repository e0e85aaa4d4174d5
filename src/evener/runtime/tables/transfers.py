"""Copies between the host's memory and a device, beside what the device computes: one lane each way."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 64  # bytes


@dataclass
class Outgoing:
    """A tensor of the device on its way to the host's memory; `source` must live until it has arrived."""

    host: Tensor
    source: Tensor
    event: Any

    def wait(self) -> Tensor:
        """The values in the host's memory."""
        self.event.synchronize()
        return self.host


class Lanes:
    """Two streams of `device` beside its own: links carry both ways at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.inwards, self.outwards = torch.Stream(device), torch.Stream(device)

    def sent(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of the host's on the device, in one copy by the lane inwards: each copy has a latency."""
        if not tensors:
            return []
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        packed = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        for start, tensor in zip(starts, tensors, strict=True):
            packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        with self.inwards:
            there = packed.to(self.device, non_blocking=True)
            return [
                there[start : start + t.nbytes].view(t.dtype).view(t.shape)
                for start, t in zip(starts, tensors, strict=True)
            ]

    def outgoing(self, tensor: Tensor) -> Outgoing:
        """`tensor`, which the current stream makes, on its way out."""
        self.outwards.wait_stream(torch.accelerator.current_stream(self.device))
        with self.outwards:
            host = tensor.detach().to("cpu", non_blocking=True)
        return Outgoing(host, tensor, self.outwards.record_event())
