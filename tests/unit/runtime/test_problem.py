"""Batches as people write them, and losses as people return them."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn

from evener.errors import ModelError, UsageError
from evener.runtime.problem import Problem, default_inputs, shapes_of, to_device, weight_of_loss

Sample = namedtuple("Sample", ["image", "label"])
X, Y = torch.ones(4, 2), torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize("pair", [(X, Y), [X, Y], Sample(X, Y)], ids=["tuple", "list", "named tuple"])
def test_pairs_are_input_and_target(pair):
    args, kwargs, target = default_inputs(pair)
    assert (len(args), kwargs) == (1, {})
    assert args[0] is X and target is Y


def test_a_mapping_becomes_keywords_and_is_the_target():
    batch = OrderedDict(ids=X, labels=Y)
    args, kwargs, target = default_inputs(batch)
    assert args == () and kwargs == {"ids": X, "labels": Y} and type(kwargs) is dict
    assert target is batch


def test_a_tensor_is_input_and_target():
    args, kwargs, target = default_inputs(X)
    assert args[0] is X and kwargs == {} and target is X


@pytest.mark.parametrize("batch", [(X, Y, Y), (X,), 3.0, object()], ids=["three", "one", "number", "object"])
def test_anything_else_asks_for_inputs(batch):
    with pytest.raises(UsageError, match="inputs=lambda batch"):
        default_inputs(batch)


@pytest.mark.parametrize(
    "batch",
    [X, (X, Y), [X, "text"], Sample(X, Y), {"ids": X, "meta": {"n": 3, "more": (Y,)}}],
    ids=["tensor", "tuple", "list", "named tuple", "mapping"],
)
def test_to_device_moves_every_tensor_and_keeps_the_shape(batch):
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is type(batch)
    assert shapes_of(moved) == shapes_of(batch)
    found = []

    def visit(value):
        if isinstance(value, torch.Tensor):
            found.append(value.device.type)
        for part in (
            value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        ):
            visit(part)

    visit(moved)
    assert found and set(found) == {"meta"}


def test_to_device_keeps_fields_and_what_is_no_tensor():
    moved = to_device(Sample(X, "cat"), torch.device("cpu"))
    assert moved.image is X and moved.label == "cat"


def test_equal_work_has_equal_shapes():
    assert shapes_of((X, {"a": Y})) == ((4, 2), ((4,),))
    assert shapes_of((X[:3], Y)) != shapes_of((X, Y))
    assert shapes_of("text") == ()


def squared(output, target):
    return (output.squeeze(-1) - target).square().mean()


def test_forward_is_loss_of_model_and_target():
    model = nn.Linear(2, 1)
    loss, metrics = Problem(loss=squared, inputs=default_inputs).forward(model, (X, Y))
    assert loss.item() == pytest.approx(squared(model(X), Y).item()) and metrics == {}


def test_a_loss_may_bring_metrics():
    def loss(out, y):
        return out.sum(), {"seen": (4.0, 4.0)}

    with pytest.raises(ModelError, match="'seen'"):
        Problem(loss=loss, inputs=default_inputs).forward(nn.Linear(2, 1), (X, Y))
    problem = Problem(loss=loss, inputs=default_inputs, metrics=("seen",))
    assert problem.forward(nn.Linear(2, 1), (X, Y))[1] == {"seen": (4.0, 4.0)}


@pytest.mark.parametrize(
    ("loss", "got"),
    [(lambda out, y: out, r"\(4, 1\)"), (lambda out, y: 1.5, "float"), (lambda out, y: None, "NoneType")],
)
def test_a_loss_that_is_no_number_is_refused(loss, got):
    with pytest.raises(ModelError, match=f"must be one number, got {got}"):
        Problem(loss=loss, inputs=default_inputs).forward(nn.Linear(2, 1), (X, Y))


def test_weight_is_samples_unless_counted():
    assert Problem(loss=squared, inputs=default_inputs).weight_of((X, Y), 4) == 4.0
    valid = Problem(loss=squared, inputs=default_inputs, weight=lambda batch: (batch[1] == 1).sum())
    assert valid.weight_of((X, Y), 4) == 0.0


@pytest.mark.parametrize("given", [-1, float("nan"), float("inf")])
def test_a_weight_that_no_mean_divides_by_is_refused(given):
    """weight=lambda batch: -1 trained, uphill."""
    with pytest.raises(UsageError, match=r"weight= gives .* for a batch of 4 samples"):
        Problem(loss=squared, inputs=default_inputs, weight=lambda batch: given).weight_of((X, Y), 4)


CLASSES = torch.tensor([1.0, 5.0, 0.5])
LABELS = torch.tensor([[0, 1], [1, 1], [2, -100], [-100, -100], [0, 2]])


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (nn.CrossEntropyLoss(), LABELS),
        (nn.CrossEntropyLoss(weight=CLASSES, label_smoothing=0.1), LABELS),
        (nn.CrossEntropyLoss(weight=CLASSES, ignore_index=1), LABELS.clamp(min=0)),
        (nn.NLLLoss(weight=CLASSES), LABELS[:, 0]),
        (nn.CrossEntropyLoss(weight=CLASSES), torch.rand(5, 3, 2, generator=torch.manual_seed(1)).softmax(1)),
    ],
    ids=["ignored", "classes", "ignored class", "log-likelihood", "probabilities"],
)
def test_cross_entropy_says_itself_what_its_mean_divides_by(loss, target):
    """Trained with samples in its place the gradient was 5 to 7 % off, and nothing said so."""
    size = (5, 3) if target.ndim == 1 else (5, 3, 2)
    output = torch.randn(size, generator=torch.manual_seed(0))
    weight = weight_of_loss(loss, default_inputs)
    parts = [(output[:2], target[:2]), (output[2:], target[2:])]
    weights = [weight(part) for part in parts]
    mean = sum(w * loss(*part) for w, part in zip(weights, parts, strict=True)) / sum(weights)
    assert float(mean) == pytest.approx(float(loss(output, target)), rel=1e-6)
    by_samples = sum(len(x) * loss(x, y) for x, y in parts) / len(output)
    assert target.is_floating_point() or abs(float(by_samples / mean) - 1) > 1e-3


def test_other_losses_divide_by_samples():
    assert weight_of_loss(nn.MSELoss(), default_inputs) is None
