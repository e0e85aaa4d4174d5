"""What checks of a device ask: is it as the CPU has it, is it refused."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def same(found: Any, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.detach().cpu(), wanted.detach(), **CLOSE)


def raises(kind: type[BaseException], words: str, work: Callable[[], Any]) -> None:
    try:
        work()
    except kind as e:
        assert words in str(e), e
        return
    raise AssertionError(f"no {kind.__name__}")


def against_cpu(device: str, make: Callable[[], nn.Module], *inputs: torch.Tensor) -> None:
    """Outputs and all gradients of a module on the device are those on the CPU."""
    torch.manual_seed(0)
    ours = make()
    theirs = copy.deepcopy(ours).to(device)

    def run(module: nn.Module, where: str) -> list[torch.Tensor]:
        out = module(*(x.to(where) for x in inputs))
        out = out[0] if isinstance(out, tuple) else out
        out.square().mean().backward()
        return [out, *(p.grad for p in module.parameters() if p.grad is not None)]

    for wanted, found in zip(run(ours, "cpu"), run(theirs, device), strict=True):
        assert found.device.type == device
        same(found, wanted)
