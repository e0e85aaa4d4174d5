"""Writing one checkpoint beside the training: each device its part, then one process makes it complete."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import Tensor

from evener.core.figures import Value
from evener.errors import EvenerError
from evener.runtime.checkpoints.files import Files
from evener.runtime.checkpoints.folder import checkpoints_in, commit, prune
from evener.runtime.checkpoints.manifest import Manifest, Shard
from evener.runtime.checkpoints.shards import Later, write_shard


class Written(Value, frozen=True, kw_only=True):
    """What a device tells of its shard; `error` says why there is none."""

    shard: Shard | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one device writes: number `place` of `places`, into the folder `partial`.

    `copy()` gives the tensors; `pause()` is called between pieces of the file and may raise to give up.
    """

    partial: Path
    device: str
    place: int
    places: int
    copy: Callable[[], Mapping[str, Tensor | Later]]
    statistics: Mapping[str, float]
    pause: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What became of a checkpoint: `path` is None where there is none, `why` then says so."""

    path: Path | None
    why: str = ""
    pruned: tuple[str, ...] = ()


def write_part(files: Files, part: Part) -> Written:
    """Copy and write this device's tensors; a failure is part of the result and leaves no file."""
    path = part.partial / f"shard-{part.place:05d}-of-{part.places:05d}.safetensors"
    try:
        tensors = part.copy()
        files.make_folder(part.partial)
        shard = write_shard(files, path, tensors, part.device, part.statistics, part.pause)
        return Written(shard=shard)
    except Exception as e:  # it must reach the others, who would wait; and no checkpoint ends a run
        try:
            files.remove(path)
        except OSError:
            return Written(error=f"{_words(e)}; {path.name} is left in {part.partial}")
        return Written(error=_words(e))


def complete(
    files: Files,
    partial: Path,
    manifest: Manifest,
    written: Sequence[Written],
    *,
    keep_last: int,
    keep_every: int = 0,
) -> Saved:
    """Make a checkpoint of the shards in `partial`, then prune; without all shards remove what there is.

    `manifest` is filled with shards and number here.
    """
    errors = [w.error for w in written if w.error]
    folder = partial.parent
    try:
        if errors:
            files.remove(partial)
            return Saved(path=None, why="; ".join(errors))
        shards = tuple(w.shard for w in written if w.shard)
        number = _newest_number(folder) + 1
        path = commit(files, partial, msgspec.structs.replace(manifest, shards=shards, number=number))
    except (OSError, EvenerError) as e:
        return Saved(path=None, why=_given_up(files, partial, e))
    try:
        return Saved(path=path, pruned=tuple(prune(files, folder, keep_last, keep_every)))
    except OSError as e:
        return Saved(path=path, why=f"older ones could not be removed: {_words(e)}")


def _given_up(files: Files, partial: Path, error: Exception) -> str:
    try:
        files.remove(partial)
    except OSError as e:
        return f"{_words(error)}; {partial} could not be removed: {_words(e)}"
    return _words(error)


def _newest_number(folder: Path) -> int:
    """The number of the newest checkpoint that can be read."""
    for checkpoint in checkpoints_in(folder):
        try:
            return checkpoint.manifest.number
        except EvenerError:
            continue
    return 0


def _words(error: BaseException) -> str:
    if isinstance(error, EvenerError):
        return error.what + (f" ({error.numbers})" if error.numbers else "")
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return f"{type(error).__name__}: {error}"
