"""Pieces on their way: what is let go before it came, what has no values, and what is not strided."""

import torch
from torch import nn

from evener.runtime.residing.flow import Copied, Flow
from evener.runtime.residing.pieces import Piece
from evener.runtime.residing.residing import Residing

CPU = torch.device("cpu")


class SlowFlow(Flow):
    """A flow whose copies are on their way until they are waited for."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.awaited: list[torch.Tensor] = []

    def await_(self, copied: Copied) -> None:
        self.awaited.append(copied.tensor)


def test_memory_is_not_let_go_while_a_copy_to_it_is_on_its_way() -> None:
    flow = SlowFlow()
    piece = Piece([nn.Parameter(torch.arange(3.0))], flow)
    piece.bring()
    coming = piece.there
    piece.release()
    assert piece.there is None
    assert len(flow.awaited) == 1 and flow.awaited[0] is coming
    piece.release()
    assert len(flow.awaited) == 1


class Odd(nn.Module):
    """A layer with a parameter of no values, whose graph keeps a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.nothing = nn.Parameter(torch.rand(4, 4)), nn.Parameter(torch.zeros(0, 4))
        self.matrix = torch.eye(4).to_sparse()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([torch.sparse.mm(self.matrix, x @ self.weight), self.nothing])
        return torch.tanh(rows)


class Frozen(Odd):
    """The same with its empty parameter in a piece of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing.requires_grad_(False)


def test_layers_without_values_and_with_sparse_tensors_come_and_go() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Frozen(), Frozen(), Frozen())
    x = torch.rand(4, 4)
    model(x).sum().backward()
    wanted = [layer.weight.grad.clone() for layer in model]
    model.zero_grad()
    residing = Residing(model, list(model), CPU, stay=False)
    found: dict[int, torch.Tensor] = {}
    residing.returning.accept = lambda guest, gradient: found.__setitem__(id(guest), gradient.clone())
    for layer in model:
        guest = residing.guest_of(layer.weight)
        guest.register_post_accumulate_grad_hook(lambda p: residing.returning.take(p, p.grad))
    with residing.forward():
        loss = model(x).sum()
    with residing.backward():
        loss.backward()
    for layer, gradient in zip(model, wanted, strict=True):
        torch.testing.assert_close(found[id(residing.guest_of(layer.weight))], gradient, rtol=0, atol=0)
