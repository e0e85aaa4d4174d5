"""Wrong placements in a user's model: fine on CPU tensors, an error that names them on a rehearsed card."""

from pathlib import Path

import pytest
import torch

from evener.core.catalogue import FleetFile, FleetLine, Scale, resolved
from evener.core.fleet import Device, Fleet
from evener.errors import ModelError
from evener.session.launching.launch import launch
from evener.session.recipe import load_recipe
from evener.session.request import Request

MODELS = {
    "a buffer forgotten": (
        """
class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = torch.ones(8)  # no register_buffer
    def forward(self, x):
        return x - self.mean

def model():
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), Shift()), nn.Linear(8, 3))
loss = nn.CrossEntropyLoss()
""",
        "1.1",
    ),
    "a module half moved": (
        """
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 3)
        self.others = [nn.Linear(3, 3)]  # no ModuleList
    def forward(self, x):
        return self.others[0](self.first(x))

def model():
    return nn.Sequential(nn.Linear(8, 8), Heads())
loss = nn.CrossEntropyLoss()
""",
        "1",
    ),
    "a target left on the CPU": (
        """
TARGET = torch.zeros(4, dtype=torch.long)
class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(8, 3)
    def forward(self, x):
        return self.weight(x)

def model():
    return Scored()
def loss(output, target):
    return nn.functional.cross_entropy(output, torch.zeros(len(output), dtype=torch.long))
""",
        "loss",
    ),
    "a mask made on the CPU": (
        """
class Masked(nn.Module):
    def forward(self, x):
        return x * torch.ones(x.shape)

def model():
    return nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"mask": Masked()})["mask"], nn.Linear(8, 3))
loss = nn.CrossEntropyLoss()
""",
        "1",
    ),
}

SCRIPT = """
import torch, evener as ev
from torch import nn
{model}
def recipe():
    x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
    return ev.Recipe(model=model(), dataset=list(zip(x, y)), loss=loss, global_batch=16,
                     optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
"""


def fleet() -> Fleet:
    """One card of the catalogue, 1,000 times slower."""
    file = FleetFile(
        devices=(Device(name="lab/gpu0", kind="RTX 3060"),),
        links=(FleetLine(a="lab", b="lab", kind="PCIe 4.0 x16"),),
        scaled=Scale(slower=1000),
    )
    return resolved(file, "here").as_rehearsed()


def script_in(folder: Path, text: str) -> str:
    script = folder / "job.py"
    script.write_text(SCRIPT.format(model=text), encoding="utf-8")
    return str(script)


@pytest.mark.parametrize("name", MODELS)
def test_a_wrong_placement_is_found_and_named(name: str, tmp_path: Path) -> None:
    text, where = MODELS[name]
    with pytest.raises(ModelError) as found:
        launch(
            Request(
                fleet=fleet(),
                rehearse=True,
                script=script_in(tmp_path, text),
                run_dir=str(tmp_path),
                steps=1,
                profile_s=1.0,
                quiet=True,
            )
        )
    assert "same device" in found.value.what and where in found.value.what
    assert "register_buffer" in found.value.remedy


@pytest.mark.parametrize("name", MODELS)
def test_on_cpu_tensors_it_trains(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(script_in(tmp_path, MODELS[name][0]), 0)
    loss, _ = recipe.problem.forward(recipe.model, recipe.batch_of(4))
    loss.backward()
    assert loss.isfinite() and not torch.accelerator.is_available()
