"""`ev.auto_balance`: what it measures, and that it leaves everything as it was."""

import pytest
import torch
from torch import nn

import evener as ev
from evener.errors import NoPlanFitsError, UsageError
from evener.integrations.balancing import measured, weighted
from evener.planner.chain import cut_chain


def uneven() -> nn.Sequential:
    """One wide layer before three narrow ones."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def test_the_wide_layer_gets_a_device_to_itself() -> None:
    sample = torch.randn(128, 512)
    assert ev.auto_balance(uneven(), sample, 2) == [1, 3]
    assert ev.auto_balance(uneven(), sample, ["cpu", "cpu"], mode="memory") == [1, 3]


def test_memory_counts_parameters_four_times_and_what_is_kept_for_backward_once() -> None:
    """Bytes: 4 · 4 · 8 weights, each layer's output of 16; a Tanh keeps nothing but its output."""
    module = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(4, 2, bias=False))
    cost = measured(module, torch.ones(1, 2), torch.device("cpu"), "memory")
    assert cost == [4 * 32 + 16, 16, 0, 4 * 32 + 8]


def test_layers_that_hold_much_count_in_memory_and_not_in_time() -> None:
    """An embedding of many rows: looked up in no time, kept at four times its size."""
    module = nn.Sequential(nn.Embedding(100_000, 8, sparse=True), nn.Linear(8, 256), nn.Linear(256, 256))
    sample = torch.randint(0, 100_000, (64,))
    assert ev.auto_balance(module, sample, 2, mode="memory") == [1, 2]
    assert ev.auto_balance(module, sample, 2)[0] >= 1


def test_a_device_that_comes_twice_counts_as_half() -> None:
    costs = weighted("aba", {"a": [1.0] * 8, "b": [1.0] * 8}, {"a": 2, "b": 1})
    assert cut_chain(costs) == (2, 4, 2)
    cpus = ["cpu"] * 2
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    assert ev.auto_balance(module, torch.randn(32, 64), cpus, mode="memory") == [4, 4]


def test_nothing_is_changed() -> None:
    module, sample = uneven(), torch.randn(8, 512)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    state = torch.get_rng_state()
    for mode in ("time", "memory"):
        ev.auto_balance(module, sample, 2, mode=mode)  # type: ignore[arg-type]
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_wrong_use_is_told() -> None:
    with pytest.raises(NoPlanFitsError, match="4 layers cannot fill 5 stages"):
        ev.auto_balance(uneven(), torch.randn(8, 512), 5)
    with pytest.raises(UsageError, match="needs a device"):
        ev.auto_balance(uneven(), torch.randn(8, 512), 0)
    with pytest.raises(UsageError, match=r"made from an nn.Sequential, got Linear"):
        ev.auto_balance(nn.Linear(4, 4), torch.randn(8, 4), 1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="mode='speed'"):
        ev.auto_balance(uneven(), torch.randn(8, 512), 2, mode="speed")  # type: ignore[arg-type]
