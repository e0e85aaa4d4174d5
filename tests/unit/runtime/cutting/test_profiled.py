"""A profile lists the layers in the order in which a plan may cut them, for every family."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evener.profiling.anatomy import anatomy
from evener.profiling.chain import chain_of
from evener.profiling.measure import _layers
from evener.runtime.cutting import cut, legal_cuts
from examples.text import ByteTransformer
from tests.unit.runtime.cutting.families import FAMILIES, batch, build, first_tensor


class Backwards(nn.Module):
    """Defined in another order than it runs; one layer is never called, its weight is read."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.middle, self.stem = nn.Linear(6, 2), nn.Linear(6, 6), nn.Linear(5, 6)

    def forward(self, x):
        return self.head(F.linear(self.stem(x), self.middle.weight, self.middle.bias).tanh())


def profiled(model: nn.Module, x: torch.Tensor) -> list[str]:
    pieces = chain_of(model)

    def step_loss(model, x):
        return first_tensor(model(x)).square().sum()

    return [layer.name for layer in _layers(pieces, [anatomy(model, pieces, step_loss, x, len(x))], None)]


def check(model: nn.Module, x: torch.Tensor) -> list[str]:
    names = profiled(model, x)
    places = legal_cuts(model, example=((x,), {}))
    assert names == [places[0].after, *(p.before for p in places)]
    cut(model, [names[:2], names[2:]], example=((x,), {}))
    return names


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    check(build(family), batch(family, 3))


def test_a_byte_transformer() -> None:
    names = check(ByteTransformer(), torch.randint(0, 256, (3, 9)))
    assert names == ["(root)", "embed", "embed_before", "blocks.0", "blocks.1", "norm", "head"]


def test_order_of_running_and_a_weight_that_is_only_read() -> None:
    assert check(Backwards(), torch.randn(3, 5)) == ["stem", "middle", "head"]
