"""The cap is real: what does not fit raises torch.OutOfMemoryError, and nothing leaks."""

import gc

import torch
from torch import nn

from tests.local.device.comparing import raises
from tests.local.device.opening import card_of
from tests.local.pool import Pool

WIDTH = 256


def deep_model() -> nn.Module:
    return nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def many_attempts(rank: int, world_size: int) -> None:
    card_of(memory=32e6)
    model = deep_model().to("rehearsal")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    base = torch.accelerator.memory_allocated()
    found: dict[int, set[bool]] = {}
    for attempt in range(16):
        samples = (256, 1024, 2048, 4096)[attempt % 4]
        try:
            model(torch.ones(samples, WIDTH, device="rehearsal")).square().mean().backward()
            found.setdefault(samples, set()).add(True)
        except torch.OutOfMemoryError as e:
            found.setdefault(samples, set()).add(False)
            assert "Tried to allocate" in str(e) and "total capacity of 30.52 MiB" in str(e)
            e.__traceback__ = None
        gc.collect()  # an error and the frames that it went through hold each other
        assert torch.accelerator.memory_allocated() == base, attempt
    assert found == {256: {True}, 1024: {True}, 2048: {False}, 4096: {False}}
    assert torch.accelerator.memory_stats()["num_ooms"] >= 8


def test_every_batch_above_the_cap_fails_none_below_and_nothing_leaks(pool: Pool) -> None:
    pool.run(many_attempts, 1)


class _Hungry(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, *gradients):
        return torch.cat([gradients[0]] * 160)[: len(gradients[0])]


def in_backward(rank: int, world_size: int) -> None:
    card_of(memory=64e6)
    x = torch.ones(100_000, device="rehearsal", requires_grad=True)
    for _ in range(5):  # in a Python function: 64 MB at once
        raises(torch.OutOfMemoryError, "out of memory", lambda: (_Hungry.apply(x) * 3).sum().backward())
    big = torch.ones(3_000_000, device="rehearsal", requires_grad=True)
    for _ in range(5):  # in a node of torch's own: 12 MB held, 24 MB made forward and again backward
        raises(
            torch.OutOfMemoryError, "out of memory", lambda: (big.expand(2, -1) * x.sum()).sum().backward()
        )
    y = torch.ones(3, device="rehearsal", requires_grad=True)
    (y * 2).sum().backward()
    assert y.grad is not None and y.grad.tolist() == [2, 2, 2]


def test_running_out_in_backward_is_an_error_and_not_the_end_of_the_process(pool: Pool) -> None:
    pool.run(in_backward, 1)


def counter_against_profiler(rank: int, world_size: int) -> None:
    """The device's peak over a step against what torch's profiler says that the CPU allocated."""
    card_of()
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    x = torch.randn(16, 32, 64)
    layer(x).square().mean().backward()
    with torch.profiler.profile(profile_memory=True) as profiler:
        layer(x).square().mean().backward()
    profiled = at_most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            profiled += event.nbytes()
            at_most = max(at_most, profiled)
    twin = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True).to("rehearsal")
    y = x.to("rehearsal")
    twin(y).square().mean().backward()
    before = torch.accelerator.memory_stats()["requested_bytes.all.current"]
    torch.accelerator.reset_peak_memory_stats()
    twin(y).square().mean().backward()
    counted = torch.accelerator.memory_stats()["requested_bytes.all.peak"] - before
    assert abs(counted / at_most - 1) < 0.1, (counted, at_most)


def test_the_devices_counter_agrees_with_the_profiler(pool: Pool) -> None:
    pool.run(counter_against_profiler, 1)
