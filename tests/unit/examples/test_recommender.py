"""The recommender example: what it reads, what it looks up, and its measure."""

from types import ModuleType

import pytest
import torch

from evener.core.files import read
from evener.core.layers import find_layers
from evener.core.plan import Plan
from tests.architecture.source import ROOT
from tests.unit.examples.loading import load_example

PLANS = sorted((ROOT / "examples" / "plans").glob("recommender*.json"))


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_example("recommender")


def test_area_under_the_curve(example: ModuleType) -> None:
    liked = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert example.area_under_curve(torch.tensor([1.0, 3.0, 2.0, 4.0]), liked) == 1.0
    assert example.area_under_curve(torch.tensor([4.0, 2.0, 3.0, 1.0]), liked) == 0.0
    assert example.area_under_curve(torch.tensor([1.0, 2.0, 3.0, 4.0]), liked) == 0.75


def test_ratings(example: ModuleType) -> None:
    missing = example.missing_packages()
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; {example.INSTALL}")
    train, heldout = example.ratings(1000)
    assert len(train[0]) + len(heldout[0]) == 100_000
    assert 0.19 < len(heldout[0]) / 100_000 < 0.21
    highest = train[0].max(0).values
    limits = [example.USERS, example.JOBS, example.AGES, example.MOVIES]
    assert all(int(h) < n for h, n in zip(highest[:4], limits, strict=True))
    assert int(highest[4:-1].max()) < example.GENRES
    assert int(highest[-1]) < 1000
    assert 0.5 < float(train[1].mean()) < 0.6


@pytest.mark.parametrize("path", PLANS, ids=lambda p: p.stem)
def test_plans_have_the_layers_of_the_model(example: ModuleType, path) -> None:
    names = {layer.name for layer in find_layers(example.Towers())}
    assert {n for p in read(path, Plan).pipelines for s in p.stages for n in s.layers} == names


def test_a_synthetic_table(example: ModuleType) -> None:
    model = example.Towers(500)
    assert model.cross is not None and model.cross.weight.shape == (500, example.DIM)
    assert model(torch.zeros(3, 11, dtype=torch.int64)).shape == (3,)
