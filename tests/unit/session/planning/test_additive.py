"""Losses that are no mean over samples are told before the first step; what only looks so is not."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener.core.profile import Profile
from evener.errors import ModelError
from evener.session.planning.additive import UNSEEN, check_adds_up, unseen_in
from evener.session.recipe import Recipe

CPU = torch.device("cpu")
X = torch.randn(64, 6, generator=torch.manual_seed(0))
Y = (X[:, 0] > 0).long()
MASKED = torch.where(X[:, 1] > 0.5, -100, Y)
FEW = torch.where(torch.arange(64) < 32, -100, Y)  # none in the first half, so a part's mean is 0 / 0


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x))  # on in evaluation too


def made(loss: Any, y: Tensor = Y, model: nn.Module | None = None, **more: Any) -> Recipe:
    torch.manual_seed(1)
    return Recipe(
        model=(model or nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))),
        dataset=TensorDataset(X, y),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        global_batch=32,
        **more,
    )


def masked(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def by_class(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, weight=torch.tensor([1.0, 5.0, 1.0]))


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


@pytest.mark.parametrize(
    ("recipe", "what", "remedy"),
    [
        (lambda: made(masked, MASKED), "no mean over samples", "weight="),
        (lambda: made(masked, FEW), "no mean over samples", "weight="),
        (lambda: made(by_class), "no mean over samples", "classes' weights"),
        (lambda: made(summed), "is a sum over samples", 'reduction="sum"'),
        (lambda: made(masked, model=Centred(6, 3)), "mixes the samples", "len(batch[0])"),
    ],
    ids=["masked labels", "a part without labels", "class weights", "a sum", "a model that mixes samples"],
)
def test_what_would_depend_on_the_split_is_refused_before_the_first_step(recipe, what, remedy) -> None:
    """They trained in silence, with gradients that were 5 to 7 % off."""
    with pytest.raises(ModelError, match=what) as refused:
        check_adds_up(recipe(), CPU)
    assert remedy in refused.value.remedy and "3 and 5 of them" in refused.value.numbers


@pytest.mark.parametrize(
    "recipe",
    [
        lambda: made(masked),  # beside BatchNorm and dropout, which are told elsewhere
        lambda: made(nn.CrossEntropyLoss(), MASKED),
        lambda: made(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 1.0])), MASKED),
        lambda: made(summed, reduction="sum"),
        lambda: made(masked, MASKED, weight=lambda batch: (batch[1] != -100).sum()),
        lambda: made(masked, model=Centred(6, 3), weight=lambda batch: len(batch[0])),  # accepted
    ],
)
def test_what_adds_up_or_is_the_users_word_passes(recipe) -> None:
    given = recipe()
    before = {n: t.clone() for n, t in given.model.state_dict().items()}
    state = torch.get_rng_state()
    assert check_adds_up(given, CPU) == ""
    assert torch.equal(torch.get_rng_state(), state)
    assert all(m.training for m in given.model.modules())
    assert all(torch.equal(t, before[n]) for n, t in given.model.state_dict().items())


def test_a_loss_whose_samples_cancel_is_compared_by_its_parts() -> None:
    """Losses of either sign (a critic's score): their mean was rounding alone, and was refused."""
    ends = torch.tensor([[1e4 / 3]] * 3 + [[-1e4 / 5]] * 5)
    recipe = Recipe(
        model=nn.Linear(1, 1),
        dataset=TensorDataset(ends, ends),
        loss=lambda output, target: output.mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        global_batch=8,
    )
    with torch.no_grad():
        recipe.model.weight.fill_(0.7)
        recipe.model.bias.zero_()
    assert check_adds_up(recipe, CPU) == ""


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: Noisy(6, 3), "another one each time"),
        (lambda: nn.Linear(6, 3).bfloat16(), "lower precision"),
        (lambda: nn.Linear(5, 3), "cannot be multiplied"),
    ],
)
def test_what_could_not_be_compared_is_said(model, why) -> None:
    assert why in check_adds_up(made(masked, MASKED, model=model()), CPU)


def test_samples_without_any_label_are_said_and_the_others_looked_at() -> None:
    """The first set decided for all: a mean over no label is NaN, whole and parts alike."""
    first = torch.zeros(64, dtype=torch.bool)
    first[[3 * i * 64 // 24 for i in range(8)]] = True  # what the first set takes
    with pytest.raises(ModelError, match="no mean over samples") as refused:
        check_adds_up(made(masked, torch.where(first, -100, MASKED)), CPU)
    assert "1 and 7 of them" in refused.value.numbers
    said = check_adds_up(made(masked, torch.where(first, -100, Y)), CPU)
    assert said.endswith("was not looked at in 1 of 3 tries: it is no finite number")


def test_parts_that_make_the_whole_by_chance_are_not_the_only_ones_looked_at() -> None:
    """Weights of 3, 1 and 0.5 with an ignored label were 1.5 a sample on both sides of the one cut."""
    first = torch.tensor([1, 2, 0, 0, 1, -100, 2, 1])  # each third sample, which the first set takes
    y = torch.where(torch.arange(24) % 3 == 0, first.repeat_interleave(3), torch.arange(24) % 2)
    weights = torch.tensor([1.0, 3.0, 0.5])

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, weight=weights)

    recipe = Recipe(
        model=nn.Linear(6, 3),
        dataset=TensorDataset(X[:24], y),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        global_batch=8,
    )
    with pytest.raises(ModelError, match="no mean over samples") as refused:
        check_adds_up(recipe, CPU)
    assert "1 and 7 of them" in refused.value.numbers


def test_what_was_not_compared_is_in_the_notes_of_the_run_that_measured() -> None:
    """It stood in profile.json alone, behind what else the profile's note says."""
    unseen = f"{UNSEEN} in 1 of 3 tries: it is no finite number"
    profile = Profile(model="m", layers=(), note=f"lab/a: short of time; {unseen}; size 8 left out")
    assert unseen_in(profile) == [unseen]
