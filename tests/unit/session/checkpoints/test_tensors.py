"""Weights in files: written with the user's names, read by us and by plain PyTorch."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model, save_file
from torch import nn

import evener as ev
from evener.errors import FileError
from evener.session.checkpoints.tensors import (
    GRADIENT_FILE,
    PARAMETER_FILE,
    drop_first_gradients,
    first_gradients,
    save_parameters,
)


class Tied(nn.Module):
    """A head tied to an embedding, a BatchNorm, and a buffer that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(3), persistent=False)


@pytest.fixture
def trained() -> Tied:
    torch.manual_seed(1)
    model = Tied()
    with torch.no_grad():
        for tensor in [*model.parameters(), model.norm.running_mean]:
            tensor.copy_(torch.randn(tensor.shape))
    model.norm.num_batches_tracked.fill_(5)
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    theirs = b.state_dict()
    return all(torch.equal(t, theirs[n]) for n, t in a.state_dict().items())


def test_plain_pytorch_reads_what_a_run_leaves_in_one_line(trained: Tied, tmp_path: Path) -> None:
    path = save_parameters(trained, tmp_path)
    (tmp_path / "new").touch()
    assert path.stat().st_mode == (tmp_path / "new").stat().st_mode  # safetensors': for its owner alone
    model = Tied()
    assert load_model(model, path) == (set(), [])
    assert same(trained, model) and model.head.weight is model.embed.weight


def test_a_file_or_a_run_folder_is_loaded_and_ties_stay(trained: Tied, tmp_path: Path) -> None:
    path = save_parameters(trained, tmp_path)
    for given in (path, tmp_path, str(tmp_path)):
        model = Tied()
        ev.load_weights(model, given)
        assert same(trained, model) and model.head.weight is model.embed.weight


def test_a_tied_weight_is_found_under_any_of_its_names(trained: Tied, tmp_path: Path) -> None:
    tensors = {n: t.clone() for n, t in trained.state_dict().items() if n != "embed.weight"}
    save_file(tensors, tmp_path / "other.safetensors")
    model = Tied()
    ev.load_weights(model, tmp_path / "other.safetensors")
    assert same(trained, model)


def test_missing_unexpected_and_misshapen_names_are_listed_and_nothing_is_loaded(
    trained: Tied, tmp_path: Path
) -> None:
    tensors = {n: t.clone() for n, t in trained.state_dict().items() if n not in ("norm.bias", "head.weight")}
    tensors["head.bias"] = torch.ones(8)
    tensors["extra.weight"] = torch.ones(1)
    save_file(tensors, tmp_path / PARAMETER_FILE)
    model = Tied()
    before = copy.deepcopy(model)
    with pytest.raises(FileError, match="does not hold the weights of Tied") as caught:
        ev.load_weights(model, tmp_path)
    assert caught.value.numbers == (
        "1 missing: norm.bias; 1 unexpected: extra.weight; 1 of another shape: head.bias (8,) for (7,)"
    )
    assert same(before, model)


@pytest.mark.parametrize("content", [None, b"", b"no tensors"])
def test_what_is_no_weights_file_is_said_to_be_none(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FileError, match=r"cannot read weights from .*w\.safetensors"):
        ev.load_weights(Tied(), path)


def test_gradients_of_an_earlier_run_with_more_devices_are_dropped(tmp_path: Path) -> None:
    for number in range(2):
        save_file({"w": torch.ones(1)}, tmp_path / GRADIENT_FILE.format(number))
    kept = tmp_path / PARAMETER_FILE
    save_file({"w": torch.ones(1)}, kept)
    drop_first_gradients(tmp_path)
    assert first_gradients(tmp_path) == [] and kept.exists()
