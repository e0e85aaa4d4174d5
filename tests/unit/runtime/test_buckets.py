"""Gradient buckets of two devices in one process: what is summed, in which order, and what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from evener.errors import ModelError, PeerLostError, ReductionMismatchError
from evener.runtime.buckets import GradientBuckets
from evener.runtime.ranks import Ranks
from tests.fakes import Rendezvous

DEVICES = ("lab/a", "lab/b")
ONE_EACH = 1  # a limit of one byte: every parameter travels alone


class Model(nn.Module):
    """y = last(first(x)), with a parameter that only `use_extra` uses and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 1)
        self.extra = nn.Parameter(torch.ones(1))
        self.idle = nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor, *, use_extra: bool = False) -> torch.Tensor:
        y = self.last(self.first(x)).sum()
        return y * self.extra.sum() if use_extra else y


class Pair:
    """Two devices with the same model, taken through a step side by side."""

    def __init__(self, model: nn.Module | None = None, limit: int = ONE_EACH) -> None:
        torch.manual_seed(0)
        self.meeting = Rendezvous(2)
        first = model or Model()
        self.models: list[Any] = [first, copy.deepcopy(first)]
        self.buckets = [
            GradientBuckets([list(m.parameters())], Ranks(DEVICES, name), self.meeting.wire(rank), limit)
            for rank, (m, name) in enumerate(zip(self.models, DEVICES, strict=True))
        ]

    def sum(self, steps: tuple[int, int] = (0, 0), divide_by: float = 1.0) -> None:
        """Launch what is left on both, then wait on both, then hand out."""
        for b, step in zip(self.buckets, steps, strict=True):
            b.launch_rest(step)
        for b in self.buckets:
            b.wait()
        for b in self.buckets:
            b.finish(divide_by)


X = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.0]])


def test_each_gradient_is_the_sum_over_devices_and_micro_batches_by_scale():
    pair = Pair(limit=40)
    plan = [[(X[:1], 3.0), (X[1:2], 5.0)], [(X[2:], 7.0)]]
    for model, buckets, micro_batches in zip(pair.models, pair.buckets, plan, strict=True):
        for i, (x, scale) in enumerate(micro_batches):
            buckets.begin(scale)
            if i == len(micro_batches) - 1:
                buckets.arm(0)
            model(x).backward()
    pair.sum(divide_by=15.0)
    want = copy.deepcopy(pair.models[0])
    want.zero_grad()
    ((3 * want(X[:1]) + 5 * want(X[1:2]) + 7 * want(X[2:])) / 15).backward()
    for model in pair.models:
        for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-6)


def test_buckets_leave_in_plan_order_on_both_though_one_device_has_no_gradient():
    pair = Pair()
    pair.buckets[0].begin(1.0)
    pair.buckets[0].arm(4)
    pair.models[0](X).backward()
    early = list(pair.meeting.launched[0])
    pair.sum((4, 4))
    names = [f"step 4, bucket {i}" for i in range(6)]
    assert pair.meeting.launched == [names, names]
    # `idle` is last in the model and so in bucket 0: without its gradient nothing may overtake it.
    assert early == []


def test_full_buckets_leave_while_backward_runs():
    pair = Pair(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    left_at: list[int] = []
    model, buckets = pair.models[0], pair.buckets[0]

    def watch(layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: left_at.append(len(pair.meeting.launched[0])))

    model[1].register_forward_hook(watch)
    model[0].register_forward_hook(watch)
    for last in (False, True):
        buckets.begin(1.0)
        if last:
            buckets.arm(0)
        model(X).sum().backward()
    # Only the last micro-batch sends: the second layer's two gradients go before the first layer has any.
    assert left_at == [0, 0, 0, 2]
    assert len(pair.meeting.launched[0]) == 4


def test_without_gradient_on_any_device_grad_stays_none_and_on_one_it_is_summed():
    pair = Pair()
    pair.buckets[1].begin(2.0)
    pair.models[1](X, use_extra=True).backward()
    pair.sum()
    for model in pair.models:
        assert model.idle.weight.grad is None
        assert model.extra.grad is not None and model.extra.grad.item() != 0


def test_a_micro_batch_of_weight_0_does_not_count_even_if_nan():
    pair = Pair()
    pair.buckets[0].begin(1.0)
    pair.models[0](X).backward()
    pair.buckets[0].begin(0.0)
    (pair.models[0](X, use_extra=True) * float("nan")).backward()
    pair.buckets[1].begin(0.0)
    (pair.models[1](X) * float("nan")).backward()
    pair.sum()
    want = copy.deepcopy(pair.models[0])
    want.zero_grad()
    want(X).backward()
    for model in pair.models:
        assert torch.equal(model.first.weight.grad, want.first.weight.grad)
        assert model.extra.grad is None


@pytest.mark.parametrize("steps", [(3, 4), (0, 250)])
def test_devices_in_different_steps_are_both_named(steps):
    pair = Pair()
    with pytest.raises(ReductionMismatchError) as e:
        pair.sum(steps)
    assert "lab/a summed step" in str(e.value) and "while lab/b was in another reduction" in str(e.value)
    assert f"step {steps[0]}, bucket 0" in e.value.what and "on lab/b" in e.value.numbers


def test_keys_survive_bfloat16():
    pair = Pair(Model().to(torch.bfloat16))
    for step in range(0, 60, 7):
        pair.sum((step, step))
    # bfloat16 would hold the plain numbers 6001 and 6007 of these reductions as one and the same.
    with pytest.raises(ReductionMismatchError):
        pair.sum((1000, 1001))


def test_a_second_backward_in_one_step_is_refused():
    pair = Pair(nn.Linear(2, 1))
    pair.buckets[0].begin(1.0)
    pair.buckets[0].arm(0)
    pair.models[0](X).sum().backward()
    with pytest.raises(ModelError, match="add the losses first"):
        pair.models[0](X).sum().backward()


def test_mixed_dtypes_travel_in_different_buckets():
    model = Model()
    model.first.to(torch.bfloat16)
    pair = Pair(model, limit=2**20)
    assert [b.flat.dtype for b in pair.buckets[0]._buckets] == [torch.float32, torch.bfloat16]
    for m, buckets in zip(pair.models, pair.buckets, strict=True):
        buckets.begin(1.0)
        m.last(m.first(X.to(torch.bfloat16)).float()).sum().backward()
    pair.sum()
    assert pair.models[0].first.weight.grad.dtype == torch.bfloat16
    norm = pair.buckets[0].norm()
    grads = [p.grad.float() for p in pair.models[0].parameters() if p.grad is not None]
    assert float(norm) == pytest.approx(float(torch.cat([g.flatten() for g in grads]).norm()), rel=1e-2)


def test_a_tied_parameter_is_held_and_counted_once():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    pair = Pair(model)
    assert pair.buckets[0].num_bytes == (4 + 2 + 1) * 4  # gradients, a key for each device, one flag
    pair.buckets[0].begin(1.0)
    pair.models[0](X).sum().backward()
    pair.sum()
    grad = pair.models[1][0].weight.grad
    assert torch.equal(grad, pair.models[0][1].weight.grad)
    assert float(pair.buckets[1].norm()) == pytest.approx(float(grad.norm()))


def test_multiply_scales_every_gradient():
    pair = Pair()
    pair.buckets[0].begin(1.0)
    pair.models[0](X).backward()
    pair.sum()
    before = [None if p.grad is None else p.grad.clone() for p in pair.models[1].parameters()]
    norm = float(pair.buckets[1].norm())
    pair.buckets[1].multiply(0.25)
    for p, was in zip(pair.models[1].parameters(), before, strict=True):
        assert (p.grad is None) == (was is None)
        assert was is None or torch.equal(p.grad, was * 0.25)
    assert float(pair.buckets[1].norm()) == pytest.approx(norm / 4)


def test_discarded_gradients_do_not_reach_the_next_step():
    pair = Pair()
    for model, buckets in zip(pair.models, pair.buckets, strict=True):
        buckets.begin(1.0)
        buckets.arm(0)
        model(X).backward()
        buckets.launch_rest(0)
    for b in pair.buckets:
        b.wait()
        b.discard()
    assert all(p.grad is None for m in pair.models for p in m.parameters())
    pair.sum((1, 1))
    assert all(p.grad is None for m in pair.models for p in m.parameters())


def test_frozen_parameters_are_left_out_and_a_frozen_model_is_refused():
    model = Model()
    model.first.requires_grad_(False)
    whole = Pair().buckets[0].num_bytes
    assert Pair(model).buckets[0].num_bytes < whole
    with pytest.raises(ModelError, match="requires a gradient"):
        Pair(Model().requires_grad_(False))


def test_sparse_gradients_are_refused():
    pair = Pair(nn.Embedding(4, 2, sparse=True))
    pair.buckets[0].begin(1.0)
    with pytest.raises(ModelError, match="sparse"):
        pair.models[0](torch.tensor([1, 2])).sum().backward()


def test_closed_buckets_let_go_of_the_parameters():
    pair = Pair()
    pair.buckets[0].close()
    pair.models[0](X).backward()
    assert pair.models[0].first.weight.grad is not None


def backward(pair: Pair, *devices: int, of: torch.Tensor = X) -> None:
    """The last backward of a step on these devices."""
    for rank in devices:
        pair.buckets[rank].begin(1.0)
        pair.buckets[rank].arm(0)
        pair.models[rank](of, use_extra=True).backward()


def alone(of: torch.Tensor = X) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Model()
    model(of, use_extra=True).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("outlasts", [True, False])
def test_own_sums_outlast_the_sums_over_devices_where_they_are_to(outlasts: bool) -> None:
    pair = Pair()
    buckets = pair.buckets[0]
    buckets.outlast(yes=outlasts)
    backward(pair, 0, 1)
    names = {p: name for name, p in pair.models[0].named_parameters()}
    before = buckets.own_sums()
    assert before is not None  # the first bucket waits for `idle`: nothing has left
    before = {names[p]: g.clone() for p, g in before.items()}
    for b in pair.buckets:
        b.launch_rest(0)
    for b in pair.buckets:
        b.wait()
    after = buckets.own_sums()
    assert (after is not None) == outlasts
    for found in (before, {names[p]: g for p, g in after.items()} if after else before):
        assert set(found) == set(alone())
        assert all(torch.equal(found[name], gradient) for name, gradient in alone().items())
    assert (buckets.copied_s > 0) == outlasts


def test_a_step_goes_on_with_own_sums_of_another_try() -> None:
    first, second = Pair(), Pair()
    backward(first, 0, of=X[:2])
    sums = first.buckets[0].own_sums()
    assert sums is not None
    there = dict(zip(first.models[0].parameters(), second.models[0].parameters(), strict=True))
    second.buckets[0].put({there[p]: gradient for p, gradient in sums.items()})
    backward(second, 0, of=X[2:])
    second.sum()
    for name, p in second.models[1].named_parameters():
        wanted = alone().get(name)
        assert (p.grad is None) == (wanted is None)
        assert wanted is None or torch.allclose(p.grad, wanted, rtol=1e-6)


def test_no_bucket_leaves_once_the_others_have_gone_and_all_is_there() -> None:
    pair = Pair()
    buckets = pair.buckets[0]
    buckets.hold_back(lambda: "lab/b was silent")
    backward(pair, 0)
    buckets.launch_rest(0)
    assert pair.meeting.launched[0] == []
    with pytest.raises(PeerLostError, match="lab/b was silent"):
        buckets.wait()
    sums = buckets.own_sums()
    assert sums is not None and len(sums) == len(alone())


def test_a_sum_that_cannot_begin_is_told_to_who_waits_and_not_to_the_backward() -> None:
    class Broken:
        def all_reduce(self, buffer, key, *, exact_tail=0):
            raise PeerLostError(f"{key}: nobody is there")

    model = nn.Linear(2, 1)
    buckets = GradientBuckets([list(model.parameters())], Ranks(DEVICES, "lab/a"), Broken(), ONE_EACH)
    buckets.outlast(yes=True)
    buckets.begin(1.0)
    buckets.arm(0)
    model(X).sum().backward()
    sums = buckets.own_sums()
    assert sums is not None and torch.equal(sums[model.weight], X.sum(0, keepdim=True))
    with pytest.raises(PeerLostError, match="step 0, bucket 0: nobody is there"):
        buckets.wait()


def test_complex_parameters_are_summed_like_others():
    """Keys and holders come back as complex numbers then, which are no whole ones."""
    pair = Pair(nn.ParameterList([nn.Parameter(torch.tensor([1 + 2j, 3j])), nn.Parameter(torch.ones(3))]))
    for model, buckets, factor in zip(pair.models, pair.buckets, (2.0, 3.0), strict=True):
        buckets.begin(factor)
        (model[0].real.sum() + 2 * model[0].imag.sum()).backward()
    pair.sum(divide_by=5.0)
    for model, buckets in zip(pair.models, pair.buckets, strict=True):
        assert torch.equal(model[0].grad, torch.tensor([1 + 2j, 1 + 2j])) and model[1].grad is None
        assert float(buckets.norm()) == pytest.approx(10**0.5)
