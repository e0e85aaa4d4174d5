"""BatchNorm over waves between processes: uneven ones over Gloo, beside the sums of gradients."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from evener.core.split import spans_of
from evener.runtime.batchnorm import replace_batchnorm, wave
from evener.runtime.wire import GroupWire
from tests.local.pool import Pool

WAVES = ((3, 1), (1, 4), (2, 0))
"""Samples of each process in each wave; the last has one member."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Tanh(), nn.Flatten(), nn.Linear(24, 5), nn.BatchNorm1d(5)
    ).double()


def batches() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(sum(sizes), 2, 8, generator=g, dtype=torch.float64) for sizes in WAVES]


def train(rank: int, world_size: int) -> dict[str, list]:
    """One step of three waves; what this process holds then."""
    waves = GroupWire(dist.new_group([0, 1]))
    net = model()
    replace_batchnorm(net)
    for x, sizes in zip(batches(), WAVES, strict=True):
        start, stop = spans_of(sizes)[rank]
        if stop > start:
            place = wave(net, waves if min(sizes) else None)
            with place:
                loss = net(x[start:stop]).pow(3).sum()
            with place:
                loss.backward()
    gradients = GroupWire()
    for parameter in net.parameters():
        gradients.all_reduce(parameter.grad, "gradient").wait()  # type: ignore[arg-type]
    return {
        "gradients": [p.grad.tolist() for p in net.parameters()],
        "buffers": [b.tolist() for b in net.buffers()],
    }  # type: ignore[union-attr]


def test_gradients_and_statistics_are_those_of_the_merged_micro_batches(pool: Pool) -> None:
    found = pool.run(train, 2)
    net = copy.deepcopy(model())
    for x in batches():
        net(x).pow(3).sum().backward()
    for one in found:
        for ours, parameter in zip(one["gradients"], net.parameters(), strict=True):
            assert parameter.grad is not None
            error = (torch.tensor(ours, dtype=torch.float64) - parameter.grad).norm()
            assert error <= 1e-12 * parameter.grad.norm() + 1e-13
    for ours, buffer in zip(found[0]["buffers"], net.buffers(), strict=True):  # it was in all waves
        torch.testing.assert_close(torch.tensor(ours, dtype=buffer.dtype), buffer, rtol=1e-12, atol=1e-14)
    assert found[1]["buffers"][2] == 2
