"""Checkpoints in plain PyTorch: filled, exported, listed; what is wrong is said and changes nothing."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model
from torch import nn

from evener.cli.main import main
from evener.errors import FileError, StateError, UsageError
from evener.session.checkpoints.saved import export_weights, listed
from evener.session.drop_in.checkpoints import load_checkpoint
from tests.checkpoints import save


class Small(nn.Module):
    """What `tests.checkpoints` saves."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, 2))
        self.b = nn.Parameter(torch.zeros(size, dtype=torch.float64))


def test_the_newest_good_one_goes_into_a_plain_model_and_optimiser(tmp_path: Path) -> None:
    save(tmp_path, 8)
    newest = save(tmp_path, 16).path
    (newest / "shard-00002-of-00002.safetensors").unlink()
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    position = load_checkpoint(tmp_path, model, optimizer)
    assert (position.step, position.samples_seen) == (1, 8)
    assert torch.equal(model.w, torch.full((3, 2), 8.0)) and float(model.b[0].detach()) == -8.0
    assert float(optimizer.state[model.w]["step"]) == 8.0
    load_checkpoint(save(tmp_path, 24).path, model)
    assert float(model.w[0, 0].detach()) == 24.0


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    path = save(tmp_path, 8).path
    model = Small(size=3)
    with pytest.raises(StateError, match="another model") as e:
        load_checkpoint(path, model)
    assert "b is F64 [2] there, F64 [3] here" in e.value.numbers and not model.w.any()
    with pytest.raises(StateError, match="another optimiser"):
        load_checkpoint(path, Small(), torch.optim.AdamW(Small().parameters()))
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(StateError, match="no learning-rate scheduler"):
        load_checkpoint(path, model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    assert not model.w.any() and not optimizer.state
    with pytest.raises(UsageError, match="has no checkpoint"):
        load_checkpoint(tmp_path / "nowhere", Small())
    (path / "shard-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(StateError, match="truncated"):
        load_checkpoint(path, Small())
    with pytest.raises(StateError, match="is good"):
        load_checkpoint(tmp_path, Small())


def test_the_export_is_an_ordinary_file(tmp_path: Path) -> None:
    save(tmp_path, 8)
    source = export_weights(tmp_path, tmp_path / "w.safetensors")
    assert source.name == "samples-000000000008"
    model = Small()
    load_model(model, tmp_path / "w.safetensors")
    assert torch.equal(model.w, torch.full((3, 2), 8.0))
    with pytest.raises(FileError, match="cannot write"):
        export_weights(tmp_path, tmp_path / "no" / "w.safetensors")


def test_the_list(tmp_path: Path) -> None:
    save(tmp_path, 8)
    (save(tmp_path, 16).path / "manifest.json").write_text("{}")
    second, first = listed(tmp_path)
    assert "damaged" in second.problem and second.step is None
    assert (first.step, first.samples_seen, first.num_shards, first.problem) == (1, 8, 2, "")
    assert listed(tmp_path / "nowhere") == []


def run(capsys, *args: str) -> tuple[int, dict, str]:
    with pytest.raises(SystemExit) as end:
        main(["checkpoints", *args, "--json"])
    out, err = capsys.readouterr()
    return end.value.code, json.loads(out.splitlines()[-1]), err


def test_the_command(tmp_path: Path, capsys) -> None:
    path = save(tmp_path, 8).path
    code, found, err = run(capsys, str(tmp_path), "--export", str(tmp_path / "w.safetensors"))
    assert code == 0 and found["checkpoints"][0]["samples_seen"] == 8 and "good" in err
    assert found["exported"]["from"] == str(path) and (tmp_path / "w.safetensors").exists()
    shard = path / "shard-00001-of-00002.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 128
    shard.write_bytes(raw)
    assert run(capsys, str(path), "--no-verify")[0] == 0
    code, found, _ = run(capsys, str(tmp_path))
    assert code == 1 and "checksum" in found["checkpoints"][0]["problem"]
    (tmp_path / "empty").mkdir()
    assert run(capsys, str(tmp_path / "empty"))[0] == 1
    assert run(capsys, str(tmp_path / "nowhere"))[0] == 2


def test_a_damaged_newest_one_is_named_in_full_and_is_a_no(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """In 80 columns the name was cut, beside a long reason; and the exit code was 0."""
    monkeypatch.setenv("COLUMNS", "80")
    save(tmp_path, 8)
    (save(tmp_path, 16).path / "manifest.json").write_text("{}")
    code, _, err = run(capsys, str(tmp_path))
    assert code == 1
    assert "samples-000000000016" in err and "samples-000000000008" in err
