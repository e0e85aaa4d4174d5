"""A file of outputs is whole or not there."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from evener.errors import FileError
from evener.session.prediction import outputs
from evener.session.prediction.outputs import write_outputs

OUT = {"y": torch.arange(6.0).reshape(3, 2)}


@pytest.mark.parametrize("name", ["y.npz", "y.safetensors"])
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    write_outputs(path, OUT)
    held = np.load(path)["y"] if path.suffix == ".npz" else load_file(path)["y"].numpy()
    assert (held == OUT["y"].numpy()).all()
    before = path.read_bytes()

    def full(*args: object, **_: object) -> None:
        (target,) = (a for a in args if isinstance(a, Path))
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs.np, "savez", full)
    monkeypatch.setattr(outputs, "save_file", full)
    with pytest.raises(FileError, match="No space left"):
        write_outputs(path, {"y": OUT["y"] + 1})
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [name]
