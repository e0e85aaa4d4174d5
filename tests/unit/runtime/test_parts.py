"""What crosses a cut, in pieces of samples and joined again; and what a stage keeps between its passes."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from evener.runtime.cutting import cut
from evener.runtime.parts import Alive, Part, cut_samples, join_samples
from evener.runtime.problem import Problem, default_inputs

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Cross:
    """A tensor that crosses: the dimension of its samples, and how many entries of it are one sample's."""

    sample_dim: int | None
    per_sample: int = 1


def first(copies: list[torch.Tensor]) -> torch.Tensor:
    return copies[0]


def test_samples_are_cut_where_they_lie_and_what_has_none_goes_whole() -> None:
    rows, heads, mask = torch.arange(35.0).view(5, 7), torch.arange(30.0).view(3, 10), torch.eye(3)
    slots = [Cross(0), Cross(1, 2), Cross(None)]
    cuts = cut_samples((rows, heads, mask), slots, (2, 3))
    assert [[tuple(t.shape) for t in one] for one in cuts] == [
        [(2, 7), (3, 4), (3, 3)],
        [(3, 7), (3, 6), (3, 3)],
    ]
    again = join_samples(cuts, slots, first)
    assert all(torch.equal(a, b) for a, b in zip(again, (rows, heads, mask), strict=True))


def test_copies_of_what_has_no_samples_are_joined_as_asked() -> None:
    pieces = [(torch.full((2,), 1.0),), (torch.full((2,), 2.0),)]
    (total,) = join_samples(pieces, [Cross(None)], lambda copies: torch.stack(copies).sum(0))
    assert total.tolist() == [3.0, 3.0]


def test_nothing_and_everything_are_not_touched() -> None:
    carry = (torch.ones(4, 2),)
    assert cut_samples(carry, [Cross(0)], (4,)) == [carry]
    assert cut_samples((), [], (1, 3)) == [(), ()]
    assert join_samples([carry], [Cross(0)], first) is carry
    assert join_samples([carry, ()], [Cross(0)], first) == ()


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def parts_of(model: nn.Module, stages: list[list[str]], x: torch.Tensor, **more: Any) -> list[Part]:
    made = cut(model, stages, example=((x,), {}))
    return [
        Part(
            stage=i,
            module=module,
            problem=Problem(loss=squared, inputs=default_inputs),
            device=CPU,
            is_first=i == 0,
            is_last=i == len(stages) - 1,
            ends=made,
            **more,
        )
        for i, module in enumerate(made.stages)
    ]


@pytest.mark.parametrize("recompute", [False, True])
def test_stages_one_after_another_give_the_gradients_of_the_whole(recompute: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(5, 3), torch.randn(5, 2)
    squared(model(x), y).backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    begin, end = parts_of(model, [["0", "1"], ["2"]], x[:3], recompute=recompute)
    one, two = Alive(), Alive()
    assert begin.forward(one, (x, y), ()) == {}
    carry = tuple(t.detach().requires_grad_() for t in one.outputs)
    two.pieces = [carry]
    end.forward(two, (x, y), carry)
    (back,) = end.backward(two, 2.0, ())
    assert begin.backward(one, 1.0, back) == []
    assert all(torch.allclose(p.grad, 2 * g) for p, g in zip(model.parameters(), want, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_a_recomputed_stage_keeps_what_came_in_and_not_even_its_losss_tensors(recompute: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 2))
    x, y = torch.randn(5, 3), torch.randn(5, 2)
    _, end = parts_of(model, [["0"], ["1", "2", "3"]], x[:3], recompute=recompute)
    carry = (torch.randn(5, 4, requires_grad=True),)
    mine = {t.untyped_storage()._cdata for t in [*model.parameters(), *carry, y]}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in mine:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        end.forward(Alive(pieces=[carry]), (x, y), carry)
    assert (sum(kept.values()) == 0) == recompute
    assert recompute or sum(kept.values()) >= 4 * 5 * (40 + 2)


def test_a_tensor_that_nothing_used_gets_a_gradient_of_zeros() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    x, y = torch.randn(3, 3), torch.randn(3, 2)
    _, end = parts_of(model, [["0"], ["1"]], x)
    carry = (torch.randn(3, 4, requires_grad=True),)
    alive = Alive(pieces=[carry, (torch.ones(2, 4, requires_grad=True), torch.ones(1))])
    end.forward(alive, (x, y), carry)
    used, unused = end.backward(alive, 1.0, ())
    assert used[0].abs().sum() > 0
    assert len(unused) == 1 and torch.equal(unused[0], torch.zeros(2, 4))


def test_what_another_precision_made_is_cast_to_the_stages_own_and_its_gradient_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    x, y = torch.randn(5, 3), torch.randn(5, 2)
    low, plain = (parts_of(model, [["0"], ["1"], ["2"]], x, autocast=p) for p in (torch.bfloat16, None))
    first, middle, last = Alive(), Alive(), Alive()
    low[0].forward(first, (x, y), ())
    (made,) = first.outputs
    assert made.dtype == torch.bfloat16
    middle.pieces = [(made.detach().requires_grad_(),)]
    plain[1].forward(middle, None, middle.pieces[0])
    (through,) = middle.outputs
    assert through.dtype == torch.float32
    last.pieces = [(through.detach().requires_grad_(),)]
    low[2].forward(last, (x, y), last.pieces[0])
    (to_middle,) = low[2].backward(last, 1.0, ())
    (to_first,) = plain[1].backward(middle, 1.0, to_middle)
    assert [t.dtype for t in to_middle + to_first] == [torch.float32, torch.bfloat16]
    low[0].backward(first, 1.0, to_first)
    got = [p.grad.clone() for p in model.parameters()]
    assert {g.dtype for g in got} == {torch.float32}
    model.zero_grad()
    squared(model(x), y).backward()
    for p, g in zip(model.parameters(), got, strict=True):
        assert (g - p.grad).norm() <= 0.02 * p.grad.norm()


def test_a_model_that_is_in_low_precision_itself_stays_in_it() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).bfloat16()
    x = torch.randn(3, 3).bfloat16()
    begin, end = parts_of(model, [["0"], ["1"]], x)
    alive = Alive()
    begin.forward(alive, (x, x), ())
    end.forward(Alive(pieces=[alive.outputs]), (x, torch.zeros(3, 2)), alive.outputs)
    assert [s.dtype for s in end.takes] == [torch.bfloat16]


def test_a_part_knows_its_tensors_by_the_users_names() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    begin, end = parts_of(model, [["0"], ["1"]], torch.randn(3, 3))
    assert set(begin.names) == {"0.weight", "0.bias"}
    assert {"1.weight", "1.running_mean", "1.num_batches_tracked"} <= set(end.names)
    whole = Part(stage=0, module=model, problem=begin.problem, device=CPU)
    assert set(whole.names) == set(begin.names) | set(end.names)
    assert whole.reads_batch and begin.reads_batch and end.reads_batch
    assert [s.sample_dim for s in begin.gives] == [0] and [s.sample_dim for s in end.takes] == [0]
