"""Checkpoints outside of a run: their list, their state in an ordinary model and optimiser, their weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from evener.core.figures import Value
from evener.core.files import readable
from evener.errors import FileError, StateError
from evener.runtime.checkpoints.folder import Checkpoint, checkpoints_in
from evener.runtime.checkpoints.manifest import MANIFEST
from evener.runtime.state import import_state
from evener.session.checkpoints.resume import choose
from evener.session.checkpoints.state import check_model, read_state
from evener.session.checkpoints.tensors import saved_tensors


class Listed(Value, frozen=True, kw_only=True):
    """One checkpoint of a run; `problem` says why it is not good, what is unknown then is absent."""

    name: str
    path: str
    step: int | None = None
    samples_seen: int | None = None
    num_bytes: int | None = None
    num_shards: int | None = None
    model_id: str | None = None
    problem: str = ""

    def as_json(self) -> dict[str, Any]:
        """The same for a program."""
        return msgspec.to_builtins(self)


def listed(run: Path, *, verify: bool = True) -> list[Listed]:
    """The checkpoints in a run's folder, newest first, or the one `run` is; `verify` reads every byte."""
    found = [Checkpoint(run)] if (run / MANIFEST).exists() else checkpoints_in(run)
    return [_listed(checkpoint, verify=verify) for checkpoint in found]


def _listed(checkpoint: Checkpoint, *, verify: bool) -> Listed:
    name, path = checkpoint.path.name, str(checkpoint.path)
    try:
        manifest = checkpoint.manifest
    except StateError as e:
        return Listed(name=name, path=path, problem=e.what)
    problem = ""
    if verify:
        try:
            checkpoint.check()
        except StateError as e:
            problem = e.what
    return Listed(
        name=name,
        path=path,
        step=manifest.position.step,
        samples_seen=manifest.position.samples_seen,
        num_bytes=manifest.num_bytes,
        num_shards=len(manifest.shards),
        model_id=manifest.model_id,
        problem=problem,
    )


def chosen(path: str | Path) -> Checkpoint:
    """The checkpoint at `path`, or the newest good one of the run's folder there; every byte is checked."""
    place = Path(path).resolve()
    return Checkpoint(Path(choose(str(place), place).path))


def fill(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    here: str | None = None,
) -> None:
    """Make `model` and what `optimizer` keeps what they were, for the device `here`."""
    tensors = saved_tensors(model)
    kind = type(optimizer).__name__ if optimizer is not None else None
    check_model(checkpoint, model, kind)
    state = read_state(checkpoint, list(tensors), here)
    if optimizer is not None:
        import_state(state, tensors, optimizer)
        return
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(state[f"model/{name}"])


def export_weights(path: str | Path, file: str | Path) -> Path:
    """Write the weights of a checkpoint, or of a run's newest good one, as one file; the checkpoint's path.

    Parameters and buffers stand under the model's own names, tied ones once: `ev.load_weights` and
    safetensors' `load_model` read it. FileError where the file cannot be written.
    """
    checkpoint = chosen(path)
    names = [n.removeprefix("model/") for n in checkpoint.manifest.wholes if n.startswith("model/")]
    state = read_state(checkpoint, names)
    weights: Mapping[str, Tensor] = {n: state[f"model/{n}"].contiguous() for n in names}
    try:
        save_file(dict(weights), file, metadata={"format": "pt"})
        readable(file)
    except (OSError, SafetensorError) as e:
        raise FileError(f"cannot write {file}: {e}", remedy="a folder with room that you may write to") from e
    return checkpoint.path
