"""What is counted: FLOPs against torch's own counter and by hand, bytes by hand, nothing for views."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from evener.rehearsal.counting import Counter, Work


def count(work: Callable[[], Any]) -> tuple[Any, Work]:
    """The result of `work`, and what it asked of the device."""
    with Counter() as counter:
        result = work()
    return result, counter.work()


def test_worked_number() -> None:
    x = torch.ones(100, 100)
    result, work = count(lambda: x @ x)
    assert work == Work(flops={("matmul", "float32"): 2e6}, num_ops=1)
    assert torch.equal(result, x @ x)


def test_training_step_of_a_convolutional_net_agrees_with_torch() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 5, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(180, 7)
    )
    x = torch.randn(2, 3, 8, 8)

    def step() -> None:
        model(x).square().sum().backward()

    with FlopCounterMode(display=False) as theirs:
        step()
    _, work = count(step)
    assert sum(work.flops.values()) == theirs.get_total_flops() > 0
    assert {family for family, _ in work.flops} == {"convolution", "matmul"}


def test_cpu_attention_is_counted_forward_and_backward() -> None:
    q = torch.randn(2, 3, 16, 8, requires_grad=True)

    def attend() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    product = 2 * 2 * 3 * 16 * 16 * 8  # one of the matrix products inside: batch, heads, queries, keys, width
    out, forward = count(attend)
    assert forward.flops == {("attention", "float32"): 2 * product}
    _, backward = count(out.sum().backward)
    assert backward.flops == {("attention", "float32"): 5 * product}  # it computes the scores again


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU])
def test_recurrent_layers_are_counted(layer: type) -> None:
    model = layer(4, 6)
    gates = 4 if layer is torch.nn.LSTM else 3
    x = torch.randn(5, 2, 4)
    (out, _), forward = count(lambda: model(x))
    by_hand = 2 * 5 * 2 * gates * 6 * (4 + 6)
    assert sum(forward.flops.values()) == by_hand
    _, backward = count(out.sum().backward)
    assert by_hand < sum(backward.flops.values()) <= 2 * by_hand


def test_views_and_allocations_cost_nothing() -> None:
    x = torch.ones(4, 6)
    _, work = count(lambda: (x.t().reshape(4, 6).view(24)[3:].detach(), torch.empty(5), x.expand(2, 4, 6)))
    assert work.num_ops == 1  # reshape of a transposed matrix copies
    assert work.num_bytes == 2 * 24 * 4


@pytest.mark.parametrize(
    ("options", "moved"),
    [
        # gradient, weight and two moments, read and written, beside the one counter of steps
        ({"fused": True}, 2 * 4),
        # the multi-tensor form goes over memory once an operation
        ({"foreach": True}, 20),
    ],
)
def test_optimiser_bytes(options: dict, moved: int) -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    weight.grad = torch.ones(1000)
    optimizer = torch.optim.AdamW([weight], **options)
    optimizer.step()
    _, work = count(optimizer.step)
    assert not work.flops
    assert work.num_bytes / 4000 == pytest.approx(moved, abs=2)
    assert work.num_ops < 12


def test_filling_only_writes() -> None:
    x = torch.ones(1000)
    _, work = count(lambda: (x.zero_(), torch.zeros_like(x)))
    assert (work.num_ops, work.num_bytes) == (2, 2 * 4000)


def test_inference_mode_counts_the_parts_of_a_composite() -> None:
    model, x = torch.nn.Linear(8, 4), torch.ones(2, 8)
    with torch.inference_mode():
        _, work = count(lambda: model(x))
    assert work.flops == {("matmul", "float32"): 2 * 2 * 8 * 4}


def test_dtype_is_that_of_the_multipliers() -> None:
    x = torch.ones(4, 4, dtype=torch.float64)
    _, work = count(lambda: x @ x)
    assert work.flops == {("matmul", "float64"): 128}
    model = torch.nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, work = count(lambda: model(torch.ones(2, 4)))
    assert work.flops == {("matmul", "bfloat16"): 64}


def test_paused_counts_nothing() -> None:
    x = torch.ones(4, 4)
    with Counter() as counter:
        counter.paused = True
        _ = x @ x
        counter.paused = False
        assert counter.work() == Work()
        _ = x + x
    assert counter.work() == Work(num_ops=1, num_bytes=3 * 64)
