"""The image example: its data, and what it says where they are missing."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from evener.errors import DataError, UsageError
from evener.session.recipe import load_recipe
from tests.architecture.source import ROOT

SCRIPT = ROOT / "examples" / "images.py"


def recipe(monkeypatch: pytest.MonkeyPatch, which: str):
    monkeypatch.setenv("EVENER_EXAMPLE_DATA", which)
    return load_recipe(SCRIPT, seed=0)


def module_of(made):
    return sys.modules[type(made.model).__module__]


def test_digits_are_taken_when_asked_for(monkeypatch) -> None:
    made = recipe(monkeypatch, "digits")
    assert (len(made.dataset), len(made.heldout)) == (1498, 299)
    pixels, labels = made.batch_of(32)
    assert pixels.shape == (32, 1, 24, 24) and labels.max() <= 9
    loss, metrics = made.loss(made.model(pixels), labels)
    assert 1.5 < loss.item() < 3.5
    assert metrics["accuracy"][1] == 32


def test_unknown_data_is_an_error_that_lists_what_there_is(monkeypatch) -> None:
    with pytest.raises(UsageError, match="cifar") as error:
        recipe(monkeypatch, "cifar")
    assert "digits" in error.value.remedy


def test_missing_data_is_an_error_and_no_other_data(monkeypatch, tmp_path) -> None:
    module = module_of(recipe(monkeypatch, "digits"))
    monkeypatch.setenv("EVENER_EXAMPLE_DATA", "fashion-mnist")
    monkeypatch.setattr(module, "FASHION_MNIST", tmp_path)
    with pytest.raises(DataError, match="train-images") as error:
        module.recipe()
    assert "dataset-fashion-mnist" in error.value.remedy and "digits" in error.value.remedy


def test_idx_files_are_read_in_their_shape(monkeypatch, tmp_path) -> None:
    module = module_of(recipe(monkeypatch, "digits"))
    wanted = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    header = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in wanted.shape)
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(header + wanted.tobytes()))
    assert (module.read_idx(path) == wanted).all()
    path.write_bytes(b"no gzip")
    with pytest.raises(DataError):
        module.read_idx(path)


@pytest.mark.skipif(
    not Path("/usr/share/datasets/fashion-mnist").exists(),
    reason="the Debian package dataset-fashion-mnist is not installed",
)
def test_fashion_mnist_is_complete(monkeypatch) -> None:
    made = recipe(monkeypatch, "fashion-mnist")
    assert (len(made.dataset), len(made.heldout)) == (60_000, 2_000)
    pixels, labels = made.dataset.tensors
    assert pixels.shape == (60_000, 1, 28, 28) and torch.bincount(labels).tolist() == [6000] * 10
