"""What cannot be cut, and what people get told."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from evener.errors import EvenerError, ModelError, PlanMismatchError
from evener.runtime.cutting import cut, legal_cuts

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def chain(forward) -> nn.Module:
    """A model of three layers with this forward."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("count", torch.zeros(1))

    Chain.forward = forward
    return Chain()


def refused(model: nn.Module, stages: list[list[str]], error: type[EvenerError], *words: str) -> str:
    with pytest.raises(error) as e:
        cut(model, stages, example=((X,), {}))
    assert all(word in str(e.value) for word in words), str(e.value)
    return str(e.value)


ALL = [["(root)", "a"], ["b", "c", "norm"]]


def test_a_branch_on_values_names_the_line_and_the_layer_before_it() -> None:
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.sum() > 0:
            h = -h
        return self.c(self.b(h))

    refused(
        chain(forward),
        ALL,
        ModelError,
        "after layer 'a'",
        "test_refused.py",
        "if h.sum() > 0",
        "torch.export",
    )


def test_a_branch_on_how_many_values_were_selected() -> None:
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h[h > 0].shape[0] > 2:
            h = -h
        return self.c(self.b(h))

    refused(chain(forward), ALL, ModelError, "a size that depends on the values", "after layer 'a'")


def test_a_branch_on_values_inside_of_a_layer_is_no_matter() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return h if h.sum() > 0 else -h

    assert (
        cut(nn.Sequential(Inner(), nn.Linear(3, 3)), [["0"], ["1"]], example=((X,), {})).tracer == "recorded"
    )


def test_layers_in_another_order_than_they_run() -> None:
    text = refused(
        chain(lambda self, x: self.c(self.b(self.a(x)))),
        [["(root)", "c"], ["a", "b", "norm"]],
        PlanMismatchError,
        "between 'c' and 'a'",
        "'c' runs after 'a'",
    )
    assert "the layers run in the order (root), a, b, norm, c" in text


@dataclass
class Box:
    value: Tensor


class Boxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Box:
        return Box(self.linear(x))


class Unboxes(Boxes):
    def forward(self, box: Box) -> Tensor:
        return self.linear(box.value)


def test_an_object_over_a_cut_is_refused_and_the_legal_cuts_are_listed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Boxes(), Unboxes())
    refused(model, [["0", "1"], ["2"]], PlanMismatchError, "layer '1' gives a Box", "cut at one of 0 | 1")
    assert [p.legal for p in legal_cuts(model, example=((X,), {}))] == [True, False]
    cut(model, [["0"], ["1", "2"]], example=((X,), {}))


def test_an_object_in_the_output() -> None:
    refused(nn.Sequential(nn.Linear(3, 3), Boxes()), [["0"], ["1"]], ModelError, "Box", "no tensor")


class Twofold(nn.Module):
    """Gives a value and a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x)
        return h, h[:, :1]


class WritesToView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Twofold(), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, view = self.a(x)
        y = self.b(x)
        view.add_(1)
        return self.c(y) + h.sum(1, keepdim=True) + view


def test_shared_memory_written_after_the_cut() -> None:
    model = WritesToView()
    refused(model, [["a"], ["b", "c"]], PlanMismatchError, "share memory that add_()", "cut at one of b | c")
    found = cut(model, [["a", "b"], ["c"]], example=((X,), {}))
    assert len(found.stages[1].takes) == 3


def test_a_layer_that_counts_may_not_run_on_both_sides() -> None:
    model = chain(lambda self, x: self.norm(self.c(self.b(self.norm(self.a(x))))))
    refused(
        model, [["(root)", "a", "norm"], ["b", "c"]], PlanMismatchError, "before and after the cut", "norm."
    )


def test_a_layer_with_parameters_on_both_sides_is_held_twice() -> None:
    model = chain(lambda self, x: self.c(self.a(self.b(self.a(x)))))
    found = cut(model, ALL, example=((X,), {}))
    assert found.ties == (((0, "a.weight"), (1, "a.weight")), ((0, "a.bias"), (1, "a.bias")))
    assert any("'a', of stage 0, runs in stage 1" in note for note in found.notes)
    assert any("'norm' is never called" in note for note in found.notes)


def test_a_buffer_assigned_between_layers() -> None:
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.count = self.count + 1
        return self.c(self.b(h))

    refused(chain(forward), ALL, ModelError, "count")


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return 7 * g


def test_a_gradient_that_would_be_lost_is_noticed() -> None:
    model = chain(lambda self, x: self.c(self.b(Times.apply(self.a(x)))))
    refused(model, ALL, ModelError, "gradient a.weight", "a module of its own")


def test_a_model_whose_own_backward_fails() -> None:
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).exp()
        h += 1
        return self.c(self.b(h))

    refused(chain(forward), ALL, ModelError, "the uncut model raised", "modified by an inplace operation")


def test_steps_that_depend_on_the_number_of_samples() -> None:
    model = chain(lambda self, x: self.c(self.b(torch.stack(list(self.a(x))))))
    refused(model, ALL, ModelError, "number of samples")


def test_a_length_that_decides_the_steps_is_fixed_with_a_note() -> None:
    def forward(self, x: Tensor) -> Tensor:
        h, total = self.a(x), 0
        for t in range(x.shape[1]):
            total = total + h[:, t]
        return self.c(self.b(total))

    example = torch.randn(2, 5, 3)
    found = cut(chain(forward), ALL, example=((example,), {}))
    assert any("args[0] dimension 1" in note for note in found.notes)
    found.flatten((torch.randn(7, 5, 3),), {})
    with pytest.raises(ModelError, match=r"args\[0\] has a size.*\n.*cut with \(2, 5, 3\)"):
        found.flatten((torch.randn(2, 6, 3),), {})


def test_an_example_that_the_model_does_not_take() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(ModelError, match="raised when called with the example: RuntimeError: mat1"):
        cut(model, [["0"], ["1"]], example=((torch.randn(2, 4),), {}))
    with pytest.raises(ModelError, match="no tensor"):
        cut(model, [["0"], ["1"]], example=((), {}))
    with pytest.raises(ModelError, match="without samples"):
        cut(model, [["0"], ["1"]], example=((torch.randn(0, 3),), {}))


def test_calls_unlike_the_example() -> None:
    def forward(self, x: Tensor, negate: bool = False) -> Tensor:
        h = self.a(x)
        return self.c(self.b(-h if negate else h))

    found = cut(chain(forward), ALL, example=((X,), {"negate": True}))
    with pytest.raises(ModelError, match="was True when the model was cut and is False now"):
        found.flatten((X,), {"negate": False})
    with pytest.raises(ModelError, match="in another way"):
        found.flatten((X,), {})
    with pytest.raises(ModelError, match="2 given, 1 cross"):
        found.stages[1]((X, X))


def test_two_parameters_in_one_memory() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(model[0].weight.data)
    refused(model, [["0"], ["1"]], ModelError, "0.weight and 1.weight are two parameters in the same memory")


def test_cutting_into_a_stage_of_nothing_that_runs() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.spare, self.b = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    refused(Unused(), [["a"], ["spare"], ["b"]], PlanMismatchError, "nothing to run")
    found = cut(Unused(), [["a", "spare"], ["b"]], example=((X,), {}))
    assert "spare.weight" in found.stages[0].named and "never called" in found.notes[0]
