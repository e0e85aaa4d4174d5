"""Checkpoints in plain PyTorch: their list, their state in an ordinary model and optimiser, their weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from evener.core.figures import Value
from evener.core.tell import tell
from evener.errors import FileError, StateError
from evener.runtime.checkpoints.folder import Checkpoint, checkpoints_in
from evener.runtime.checkpoints.manifest import MANIFEST, Position
from evener.runtime.state import import_state
from evener.session.drop_in import ShareLoader
from evener.session.keep import saved_tensors
from evener.session.loop_options import check_options, set_options
from evener.session.resume import choose
from evener.session.state import check_model, check_position, infos_of, read_state, restore_generators


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


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loader: ShareLoader | None = None,
    *,
    scheduler: Any = None,
) -> Position:
    """Put a checkpoint, or the newest good one of a run's folder, into a model and optimiser.

    Every byte is checked first. Works in plain PyTorch, and in every process of a loop over what `ev.prepare`
    gave: the next turn of `loader` is then the one that would have come. Returns where in its data the run
    was: `step`, `samples_seen` and what the order of samples follows from. Options of parameter groups
    (learning rate, ...) are set where a loop of one's own saved them; a recipe's follow from samples seen.
    StateError where it is damaged, or of another model, optimiser or order of samples; nothing has changed
    then.
    Example: `load_checkpoint("runs/text-…", model, optimizer).samples_seen`.
    """
    checkpoint = _chosen(path)
    manifest = checkpoint.manifest
    if loader is not None:
        check_position(manifest.position, loader.position, checkpoint)
    if optimizer is not None:
        check_options(manifest.options, optimizer, scheduler)
    fill(checkpoint, model, optimizer, loader.ranks.here if loader else None)
    if optimizer is not None:
        set_options(manifest.options, optimizer, scheduler)
    if loader is not None:
        loader.go_on_from(manifest.position)
        for sentence in restore_generators(checkpoint, loader.ranks.here, loader.device):
            tell(sentence)
    return manifest.position


def _chosen(path: str | Path) -> Checkpoint:
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
    check_model(checkpoint.manifest, infos_of(model), kind, checkpoint.path)
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
    checkpoint = _chosen(path)
    names = [n.removeprefix("model/") for n in checkpoint.manifest.wholes if n.startswith("model/")]
    state = read_state(checkpoint, names)
    weights: Mapping[str, Tensor] = {n: state[f"model/{n}"].contiguous() for n in names}
    try:
        save_file(dict(weights), file, metadata={"format": "pt"})
    except (OSError, SafetensorError) as e:
        raise FileError(f"cannot write {file}: {e}", remedy="a folder with room that you may write to") from e
    return checkpoint.path
