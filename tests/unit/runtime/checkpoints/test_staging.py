"""Copies show the state of the boundary, though the training goes on; the optimiser waits for them alone."""

import threading

import pytest
import torch
from torch import nn, optim

from evener.runtime.checkpoints.staging import Staging


def test_the_copy_is_of_the_boundary_and_the_optimiser_waits_for_it() -> None:
    p = nn.Parameter(torch.zeros(4))
    p.grad = torch.ones(4)
    optimizer = optim.SGD([p], lr=1.0)
    clock = iter(range(100))
    staging = Staging(optimizer, clock=lambda: float(next(clock)))
    copy = staging.begin({"p": p.detach()}, ())
    found: list[dict[str, torch.Tensor]] = []
    moving = threading.Thread(target=optimizer.step)
    moving.start()
    moving.join(0.05)
    assert moving.is_alive() and p.detach().sum() == 0, "the optimiser must wait"
    found.append(copy())
    moving.join(5)
    assert torch.equal(found[0]["p"], torch.zeros(4)) and torch.equal(p.detach(), -torch.ones(4))
    assert staging.wait_s == 1.0
    staging.close()
    optimizer.step()


def test_what_forwards_move_is_copied_at_once() -> None:
    p, buffer = nn.Parameter(torch.zeros(2)), torch.zeros(2)
    staging = Staging(optim.SGD([p], lr=1.0))
    copy = staging.begin({"p": p.detach(), "buffer": buffer}, {"buffer"})
    buffer.add_(1)
    assert torch.equal(copy()["buffer"], torch.zeros(2))
    staging.close()


def test_memory_is_kept_and_follows_shapes() -> None:
    staging = Staging(optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
    first = staging.begin({"x": torch.ones(3, dtype=torch.bfloat16)}, ())()["x"]
    second = staging.begin({"x": torch.zeros(3, dtype=torch.bfloat16)}, ())()["x"]
    assert second.data_ptr() == first.data_ptr() and torch.equal(second, torch.zeros(3, dtype=torch.bfloat16))
    other = staging.begin({"x": torch.arange(12.0).view(3, 4).t()}, ())()["x"]
    assert torch.equal(other, torch.arange(12.0).view(3, 4).t()) and other.is_contiguous()
    staging.close()


def test_a_copy_that_fails_frees_the_optimiser() -> None:
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.ones(2)
    optimizer = optim.SGD([p], lr=1.0)
    staging = Staging(optimizer)
    state = {"p": torch.zeros(2)}
    copy = staging.begin(state, ())
    state["p"].resize_(5)
    with pytest.raises(ValueError):
        copy()
    optimizer.step()
