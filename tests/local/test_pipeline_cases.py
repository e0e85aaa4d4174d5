"""Cases K9 to K11, the public way: one clip norm, uneven micro-batches, tied weights in two stages."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import default_collate

from evener.core.plan import Plan
from evener.runtime.cutting import cut, layer_names
from evener.session.checkpoints.tensors import PARAMETER_FILE, first_gradients
from evener.session.launching.launch import launch
from evener.session.recipe import load_recipe
from evener.session.request import Request
from tests.local import plans
from tests.local.plans import stage
from tests.local.runs import run_of, verified

A, B, C = "lab/a", "lab/b", "lab/c"
plan_of = partial(plans.plan_of, schedule="1f1b")
SCRIPT = """
import torch, evener as ev
from torch import nn
from torch.utils.data import default_collate
from torch.nn.functional import cross_entropy

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 5), nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))

def samples(count, masked=()):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 5, generator=generator)
    y = torch.randint(0, 3, (count,), generator=generator)
    y[list(masked)] = -100
    return list(zip(x, y))

def words(count):
    ids = torch.randint(0, 11, (count, 4), generator=torch.Generator().manual_seed(1))
    return list(zip(ids, ids.roll(1, 1)))

def blocks():
    layers = [l for _ in range(4) for l in (nn.Linear(5, 5), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(5, 3))

def small():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

def recipe():
    return ev.Recipe(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {recipe})
"""
SMALL = "model=small(), dataset=samples(8), loss=lambda o, t: 10 * cross_entropy(o, t), max_norm=1.0"
TIED = (
    "model=Tied(), dataset=words(10), loss=lambda o, t: 10 * cross_entropy(o.flatten(0, 1), t.flatten()), "
    "max_norm=1.0"
)


def request_for(folder: Path, recipe: str, plan: Plan, steps: int = 5) -> Request:
    text = SCRIPT.replace("{recipe}", f"{recipe}, global_batch={plan.global_batch}")
    return run_of(folder, text, plan, steps=steps)


def norms_by_device(folder: Path) -> list[float]:
    """The norm of the gradients that each device's optimiser got in the first step, after clipping."""
    return [float(torch.stack([g.norm() for g in own.values()]).norm()) for own in first_gradients(folder)]


def test_k9_one_clip_norm_over_the_owners_of_both_layers(tmp_path: Path) -> None:
    verified(request_for(tmp_path, SMALL, plan_of((8, (stage("0 1", (A, 4)), stage("2", (B, 4)))))))
    first, second = norms_by_device(tmp_path / "float64")
    # Before clipping 2.715 and 5.068, together 5.750; clipped each by its own norm both would be 1.
    assert (first, second) == (pytest.approx(2.715 / 5.750, abs=1e-3), pytest.approx(5.068 / 5.750, abs=1e-3))
    assert first**2 + second**2 == pytest.approx((5.750 / (5.750 + 1e-6)) ** 2, rel=1e-6)


def test_k9_replicated_parameters_count_once_in_the_norm(tmp_path: Path) -> None:
    """Three devices, two pipelines cut differently, a shared stage: 0 on a and c, 2 on all three."""
    whole = (stage("0 1 2", (C, 2)),)
    plan = plan_of((5, (stage("0", (A, 3)), stage("1 2", (A, 1), (B, 2)))), (3, whole))
    verified(request_for(tmp_path, SMALL, plan))
    a, b, c = first_gradients(tmp_path / "float64")
    assert set(b) == {"2.weight", "2.bias"} and set(a) == set(c) == {"0.weight", "0.bias", *b}
    assert norms_by_device(tmp_path / "float64")[2] == pytest.approx(1.0, rel=1e-5)


def test_k9_tied_parameters_count_once_in_the_norm(tmp_path: Path) -> None:
    verified(request_for(tmp_path, TIED, plan_of((6, (stage("embed", (A, 2)), stage("head", (B, 2)))))))
    assert norms_by_device(tmp_path / "float64") == [pytest.approx(1.0, rel=1e-5)] * 2


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    "loss",
    [
        "loss=nn.CrossEntropyLoss(), dataset=samples(14)",
        "loss=nn.CrossEntropyLoss(reduction='sum'), dataset=samples(14)",
        "loss=nn.CrossEntropyLoss(), dataset=samples(14, (0, 1, 2, 5, 9)), "
        "weight=lambda b: (b[1] != -100).sum()",
    ],
    ids=["mean", "sum", "masked"],
)
def test_k10_uneven_micro_batches_and_then_a_smaller_batch(tmp_path: Path, loss: str, schedule: str) -> None:
    """Cut 4+1 blocks; 8 samples as 3+3+2, then the epoch's last 6 as 3+3."""
    cut_4_1 = (stage("0 1 2 3 4 5 6 7", (A, 3)), stage("8", (B, 3)))
    plan = plan_of((8, cut_4_1), schedule=schedule)
    result = verified(request_for(tmp_path, f"model=blocks(), {loss}", plan, steps=4))
    assert result.plan.pipelines[0].micro_batch_sizes == (3, 3, 2)


@pytest.mark.parametrize("num_layers", [7, 30, 61])
@pytest.mark.parametrize("num_stages", [2, 3, 4, 5])
def test_k10_the_stages_together_are_the_model(num_layers: int, num_stages: int) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(num_layers)))
    names = layer_names(model)
    assert len(names) == num_layers
    edges = [i * num_layers // num_stages for i in range(num_stages + 1)]
    stages = [names[edges[i] : edges[i + 1]] for i in range(num_stages)]
    held = [set(s.named) for s in cut(model, stages, example=((torch.ones(2, 3),), {})).stages]
    assert sum(map(len, held)) == 2 * num_layers
    assert set().union(*held) == {n for n, _ in model.named_parameters()}


def test_k11_an_embedding_tied_to_a_head_two_stages_away_stays_tied(tmp_path: Path) -> None:
    plan = plan_of((6, (stage("embed", (A, 2)), stage("head", (B, 2)))))
    verified(request_for(tmp_path, TIED, plan))
    for seen in first_gradients(tmp_path / "float64"):
        assert list(seen) == ["embed.weight"], "one parameter, whoever holds it"
    outcome = launch(request_for(tmp_path, TIED, plan))
    assert outcome.parameters_agree
    tensors = load_file(tmp_path / PARAMETER_FILE)
    assert list(tensors) == ["embed.weight"]
    model = nn.Module()
    model.embed, model.head = nn.Embedding(11, 5), nn.Linear(5, 11, bias=False)
    model.head.weight = model.embed.weight
    assert model.load_state_dict(tensors, strict=False).unexpected_keys == []
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, tensors["embed.weight"])


def test_k11_tied_across_pipelines_of_other_cuts(tmp_path: Path) -> None:
    plan = plan_of((4, (stage("embed", (A, 2)), stage("head", (B, 2)))), (2, (stage("embed head", (C, 1)),)))
    verified(request_for(tmp_path, TIED, plan))


def test_held_out_samples_go_through_the_same_plan_in_evaluation_mode(tmp_path: Path) -> None:
    """A hybrid with a shared stage; dropout, masked labels, and 11 samples for a plan of 8."""
    recipe = (
        "model=nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3)), dataset=samples(16), "
        "heldout=samples(11, (0, 1, 10)), loss=nn.CrossEntropyLoss(), weight=lambda b: (b[1] != -100).sum()"
    )
    shared = (stage("0", (A, 3)), stage("1 2", (A, 1), (B, 2)))
    request = request_for(tmp_path, recipe, plan_of((5, shared), (3, (stage("0 1 2", (C, 2)),))), steps=1)
    outcome = launch(request)
    made = load_recipe(request.script, 0)
    x, y = default_collate(made.heldout)
    with torch.no_grad():
        wanted = made.loss(made.model.eval()(x), y)
    assert outcome.heldout_first == pytest.approx(float(wanted), rel=1e-6)
