"""Beside training: a pipeline evaluates and saves what plain PyTorch finds, and any plan goes on from it."""

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_model, save_model
from torch import nn
from torch.nn.functional import cross_entropy

from evener.core.plan import Pipeline, Plan
from evener.errors import FileError
from evener.session.checkpoints.tensors import PARAMETER_FILE
from evener.session.launching.launch import launch
from evener.session.recipe import Recipe, load_recipe
from evener.session.request import Request
from tests.local.plans import stage
from tests.local.runs import run_of

A, B, C = "lab/a", "lab/b", "lab/c"
SCRIPT = """
import torch, evener as ev
from torch import nn
from torch.nn.functional import cross_entropy

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, ids):
        return self.head(self.drop(torch.tanh(self.mix(self.embed(ids)))))

def words(count, seed):
    ids = torch.randint(0, 11, (count, 4), generator=torch.Generator().manual_seed(seed))
    return list(zip(ids, ids.roll(1, 1)))

def loss(output, target):
    right = (output.argmax(-1) == target).double()
    return cross_entropy(output.flatten(0, 1), target.flatten()), {"accuracy": (right.sum(), right.numel())}

def recipe():
    return ev.Recipe(
        model=Tied(), dataset=words(24, 1), heldout=words(7, 2), loss=loss, metrics=("accuracy",),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5), global_batch=6,
    )
"""


# The held-out 7 samples are another split of shares and micro-batches than the 6 of a step.
HYBRID = Plan(
    global_batch=6,
    pipelines=(
        Pipeline(
            samples=4, micro_batch=2, stages=(stage("embed mix", (A, 1), (B, 1)), stage("drop head", (C, 2)))
        ),
        Pipeline(samples=2, micro_batch=1, stages=(stage("embed", (B, 1)), stage("mix drop head", (A, 1)))),
    ),
    schedule="1f1b",
)
ALONE = Plan(
    global_batch=6,
    pipelines=(Pipeline(samples=6, micro_batch=6, stages=(stage("embed mix drop head", (A, 6)),)),),
)


def request_for(folder: Path, plan: Plan, steps: int) -> Request:
    return run_of(folder, SCRIPT, plan, steps=steps)


def plain_evaluation(recipe: Recipe) -> tuple[float, float]:
    """Mean loss and accuracy over the held-out samples, in plain PyTorch."""
    x, y = (torch.stack(column) for column in zip(*recipe.heldout, strict=True))
    recipe.model.eval()
    with torch.no_grad():
        output = recipe.model(x)
    loss = cross_entropy(output.flatten(0, 1), y.flatten())
    return float(loss), float((output.argmax(-1) == y).double().mean())


def test_heldout_loss_of_a_hybrid_is_plain_pytorchs_on_the_saved_weights(tmp_path: Path) -> None:
    request = request_for(tmp_path, HYBRID, steps=4)
    outcome = launch(request)
    recipe = load_recipe(request.script, seed=0)
    first, _ = plain_evaluation(recipe)
    load_model(recipe.model, tmp_path / PARAMETER_FILE)
    last, accuracy = plain_evaluation(recipe)
    assert outcome.heldout_first == pytest.approx(first, rel=1e-6)
    assert outcome.heldout_loss == pytest.approx(last, rel=1e-6) and last != pytest.approx(first, rel=1e-2)
    assert outcome.heldout_metrics == {"accuracy": pytest.approx(accuracy)}
    assert recipe.model.head.weight is recipe.model.embed.weight


def test_one_device_goes_on_from_the_weights_of_a_hybrid_and_the_other_way_round(tmp_path: Path) -> None:
    left = launch(request_for(tmp_path, HYBRID, steps=4))
    for name, plan in (("alone", ALONE), ("hybrid", HYBRID)):
        folder = tmp_path / name
        folder.mkdir()
        came = launch(replace(request_for(folder, plan, steps=1), weights=str(tmp_path)))
        assert came.heldout_first == pytest.approx(left.heldout_loss, rel=1e-6)


def test_weights_of_another_model_are_refused_by_all_before_the_first_step(tmp_path: Path) -> None:
    save_model(nn.Linear(3, 3), str(tmp_path / "other.safetensors"))
    request = replace(request_for(tmp_path, ALONE, steps=1), weights=str(tmp_path / "other.safetensors"))
    with pytest.raises(FileError, match="does not hold the weights of Tied") as caught:
        launch(request)
    assert caught.value.numbers == "3 missing: embed.weight, mix.weight, mix.bias; 2 unexpected: bias, weight"
    assert not (tmp_path / PARAMETER_FILE).exists()
