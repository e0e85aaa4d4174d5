"""Predictions through plans of every shape equal `model(x)` of the plain model, in the dataset's order."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import evener as ev
from evener.cli.main import main
from evener.core.figures import line
from evener.core.files import write
from evener.core.fleet import Device, Fleet, Link
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.errors import DataError, ModelError, UsageError
from evener.session.predict import run_prediction
from evener.session.prediction.outputs import Keeper
from evener.session.recipe import load_recipe
from evener.session.request import Prediction, Request, check_out

SCRIPT = """
import torch, evener as ev
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(9)
        self.body = nn.Sequential(nn.Linear(6, 9), norm, nn.Tanh(), nn.Dropout(0.5), nn.Linear(9, 9))
        self.head = nn.Linear(9, 3)
    def forward(self, x):
        h = self.body(x)
        return {"scores": self.head(h), "more": (h, x.sum(1)), "scale": h.mean()}

def loss(output, target):
    right = (output["scores"].argmax(1) == target).sum()
    return nn.functional.cross_entropy(output["scores"], target), {"accuracy": (right, len(target))}

def recipe():
    g = torch.Generator().manual_seed(3)
    samples = [(torch.randn(6, generator=g), i % 3) for i in range(29)]
    model = Two()
    model.body[1].running_mean.normal_()
    return ev.Recipe(
        model=model, dataset=samples[:18], heldout=samples[18:], loss=loss, metrics=("accuracy",),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), global_batch=8,
    )
"""
LAYERS = ("body.0", "body.1", "body.2", "body.3", "body.4", "head")
FLEET = Fleet(
    devices=tuple(Device(name=f"lab/{n}", kind="cpu", threads=1) for n in "abc"),
    links=(Link(a="lab", b="lab", curve=line(1e-4, 1e9)),),
)


def pipeline(samples: int, micro_batch: int, *stages: tuple[int, dict[str, int]]) -> Pipeline:
    """Stages end before the given layers; each has samples by device."""
    ends = [0, *(end for end, _ in stages)]
    return Pipeline(
        samples=samples,
        micro_batch=micro_batch,
        stages=tuple(
            Stage(
                layers=LAYERS[first:end],
                shares=tuple(Share(devices=(f"lab/{d}",), samples=n) for d, n in shares.items()),
            )
            for first, (end, shares) in zip(ends, stages, strict=False)
        ),
    )


PLANS = {
    "uneven": (pipeline(5, 3, (6, {"a": 3})), pipeline(3, 2, (6, {"c": 2}))),
    "pipeline": (pipeline(8, 3, (2, {"b": 3}), (4, {"a": 3}), (6, {"c": 3})),),
    "shared": (pipeline(8, 4, (3, {"a": 4}), (6, {"b": 3, "c": 1})),),
    "hybrid": (pipeline(5, 3, (4, {"c": 3}), (6, {"a": 3})), pipeline(3, 2, (6, {"b": 2}))),
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def plain(script: Path, dtype: torch.dtype, samples: list) -> dict[str, torch.Tensor]:
    model = load_recipe(script, 0).model.to(dtype).eval()
    with torch.no_grad():
        out = model(torch.stack([x for x, _ in samples]).to(dtype))
    return {"scores": out["scores"], "more.0": out["more"][0], "more.1": out["more"][1]}


@pytest.mark.parametrize("name", PLANS)
def test_any_plan_gives_what_the_plain_model_gives(name: str, script: Path) -> None:
    out = script.parent / "out.safetensors"
    request = Request(
        script=str(script),
        fleet=FLEET,
        run_dir=str(script.parent),
        plan=Plan(global_batch=8, pipelines=PLANS[name]),
        dtype="float64",
        elastic=False,
        quiet=True,
        predict=Prediction(data="heldout", out=str(out), score=True),
    )
    told = run_prediction(request)
    assert told is not None and told.samples == 11
    samples = load_recipe(script, 0).heldout
    expected, found = plain(script, torch.float64, samples), load_file(out)
    assert list(told.outputs) == list(expected)
    for key, value in expected.items():
        assert torch.allclose(found[key], value, rtol=0, atol=1e-12), key
    targets = torch.tensor([y for _, y in samples])
    right = (expected["scores"].argmax(1) == targets).double().mean()
    assert told.metrics["accuracy"] == pytest.approx(float(right))
    wanted = torch.nn.functional.cross_entropy(expected["scores"], targets)
    assert told.loss == pytest.approx(float(wanted), abs=1e-12)
    assert told.notes == ("left out, as they have no dimension of samples: scale",)


def test_in_this_process_with_weights_and_samples_of_ones_own(script: Path, tmp_path: Path) -> None:
    recipe = load_recipe(script, 0)
    doubled = {n: t * 2 if t.is_floating_point() else t for n, t in recipe.model.state_dict().items()}
    save_file(doubled, tmp_path / "w.safetensors")
    data = [(x + 1, y) for x, y in recipe.dataset[:5]]  # fewer than a global batch
    found = ev.predict(recipe, data, weights=tmp_path / "w.safetensors")
    model = load_recipe(script, 0).model
    model.load_state_dict(doubled)
    with torch.no_grad():
        expected = model.eval()(torch.stack([x for x, _ in data]))
    assert torch.allclose(found.outputs["scores"], expected["scores"], rtol=1e-6, atol=1e-6)
    assert found.score is None


def test_the_command_writes_npz_and_tells_it(script: Path, capsys: pytest.CaptureFixture) -> None:
    plan, fleet, out = (script.parent / n for n in ("plan.json", "fleet.json", "out.npz"))
    write(plan, Plan(global_batch=8, pipelines=PLANS["uneven"]))
    write(fleet, FLEET)
    words = [script, "--out", out, "--data", "dataset", "--plan", plan, "--fleet", fleet, "--json"]
    with pytest.raises(SystemExit) as end:
        main(["predict", *map(str, words)])
    assert end.value.code == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["samples"] == 18 and told["outputs"]["scores"] == [[18, 3], "float32"]
    expected = plain(script, torch.float32, load_recipe(script, 0).dataset)["scores"]
    assert np.allclose(np.load(out)["scores"], expected, rtol=0, atol=1e-6)


def test_a_frozen_model_predicts_and_does_not_train(tmp_path: Path) -> None:
    recipe = simple(torch.nn.Linear(1, 1).requires_grad_(False), [torch.ones(1)])
    assert ev.predict(recipe).outputs["output"].shape == (1, 1)
    with pytest.raises(ModelError, match="no parameter of the model requires a gradient"):
        ev.train(recipe, steps=1, run_dir=tmp_path)


def simple(model: torch.nn.Module, data: list) -> ev.Recipe:
    return ev.Recipe(
        model=model,
        dataset=data,
        loss=torch.nn.MSELoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        global_batch=1,
    )


def test_outputs_of_different_lengths_are_refused_with_the_remedy() -> None:
    data = [torch.ones(n) for n in (3, 4)]
    with pytest.raises(ModelError, match=r"different shapes\n.*\(3,\) and \(4,\)\n.*pads every batch"):
        ev.predict(simple(torch.nn.Tanh(), data))


def test_values_that_are_no_numbers_are_predictions_too() -> None:
    found = ev.predict(simple(torch.nn.Sequential(torch.nn.Identity()), [torch.tensor([float("nan")])]))
    assert found.outputs["output"].isnan().all()


def test_nothing_to_predict_for() -> None:
    with pytest.raises(DataError, match="nothing to predict"):
        ev.predict(simple(torch.nn.Tanh(), [torch.ones(1)]), [])


def test_a_file_of_another_kind_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ends in \.safetensors or \.npz"):
        check_out(tmp_path / "out.pt")


def test_a_keeper_copies_what_it_keeps() -> None:
    keeper, x = Keeper(None), torch.ones(2)
    keeper.expect([(0, 2)])
    keeper(x, None)
    x.zero_()
    assert keeper.pieces[0][1]["output"].sum() == 2
