"""Parameters of any strides go between processes in the order of their values."""

import torch
from torch import nn

from evener.runtime.ranks import Ranks
from evener.runtime.replicas import collect, spread_state
from tests.local.pool import Pool


def strided(first: float) -> nn.Module:
    """Parameters whose values are `first` and the numbers after it."""
    model = nn.Module()
    model.thirds = nn.Parameter((torch.arange(10.0) / 3 + first)[::3][:3])
    model.turned = nn.Parameter((torch.arange(6.0) + first).reshape(3, 2).T)
    return model


def go_round(rank: int, world_size: int) -> list[list[float]]:
    """Spread the first device's values, add one on the second, and collect those."""
    model = strided(10.0 * (rank + 1))
    spread_state(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += rank
    ranks = Ranks(("a", "b"), "ab"[rank])
    collect(model, {"thirds": ("b",), "turned": ("b",)}, ranks)
    return [p.flatten().tolist() for p in model.parameters()]


def test_strided_parameters_are_spread_and_collected_in_the_order_of_their_values(pool: Pool) -> None:
    wanted = [[11.0, 12.0, 13.0], [11.0, 13.0, 15.0, 12.0, 14.0, 16.0]]
    for found in pool.run(go_round, 2):
        assert [[round(x, 4) for x in values] for values in found] == wanted
