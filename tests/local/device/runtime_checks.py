"""What this runtime does with a device where only a device shows it, a function each: see `checks`."""

import torch
from torch import nn
from torch.nn import functional as F

from evener.runtime.problem import loss_on_cpu


def loss_in_host_memory(device: str) -> None:
    """The loss once read what the device had not copied yet, and was that of another memory's values."""
    torch.manual_seed(0)
    x, weight = torch.randn(512, 1024), torch.randn(1024, 1024)
    target = torch.randint(0, 1024, (512,))
    wanted = F.cross_entropy(x @ weight, target)
    far = (x.to(device) @ weight.to(device)).requires_grad_()
    loss = loss_on_cpu(nn.CrossEntropyLoss())(far, target)
    assert loss.device.type == "cpu"
    torch.testing.assert_close(loss, wanted, rtol=1e-3, atol=1e-3)
    loss.backward()
    assert far.grad is not None and far.grad.device.type == device
