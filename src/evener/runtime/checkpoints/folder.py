"""A run's checkpoints: listing, finding the newest good one, opening, pruning."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from evener.core.words import counted
from evener.errors import StateError
from evener.runtime.checkpoints.files import Files
from evener.runtime.checkpoints.manifest import MANIFEST, Manifest, read_manifest, sealed
from evener.runtime.checkpoints.rows import parts_of, rows_from
from evener.runtime.checkpoints.shards import check_shard, read_shard, read_slice
from evener.runtime.checkpoints.values import from_pieces, pieces_of

FOLDER = "checkpoints"
_NAME = re.compile(r"samples-(\d{12})")
_PARTIAL = re.compile(r"\.samples-\d{12}\.\w+\.partial")


def name_of(samples_seen: int) -> str:
    """The folder of a checkpoint. Example: name_of(640) is "samples-000000000640"."""
    return f"samples-{samples_seen:012d}"


def partial_of(samples_seen: int, token: str) -> str:
    """The folder that it is written in; `token` tells this writer from any before."""
    return f".{name_of(samples_seen)}.{token}.partial"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, read when first asked; StateError where it cannot be."""

    path: Path

    @cached_property
    def manifest(self) -> Manifest:
        return read_manifest(self.path)

    @property
    def samples_seen(self) -> int:
        """From the folder's name: it needs no reading."""
        match = _NAME.fullmatch(self.path.name)
        return int(match[1]) if match else self.manifest.position.samples_seen

    @property
    def label(self) -> str:
        """Its name and, where it can be read, the step. Example: "samples-000000000640 (step 40)"."""
        try:
            return f"{self.path.name} (step {self.manifest.position.step})"
        except StateError:
            return self.path.name

    def check(self) -> None:
        """Read everything; StateError where a file is missing, truncated or damaged."""
        for shard in self.manifest.shards:
            check_shard(self.path, shard)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a tensor, on the host, whole or in parts, from whatever shards."""

        def read(part: str, first: int, end: int) -> Tensor:
            for shard in self.manifest.shards:
                if part in shard.tensors:
                    return read_slice(self.path, shard, part, first, end)
            raise StateError(f"the checkpoint {self.path} lacks {part}")

        return rows_from(self.manifest.tensors, name, start, stop, read)

    def _read_one(self, name: str) -> Tensor:
        shard = next(s for s in self.manifest.shards if name in s.tensors)
        return read_shard(self.path, shard, [name])[name]

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """The tensors `names`, on the host, from whatever shards they are in."""
        result: dict[str, Tensor] = {}
        in_pieces = pieces_of(self.manifest.tensors)
        for name in names:
            if name in in_pieces:
                result[name] = from_pieces(in_pieces[name], self._read_one)
        in_parts = parts_of(self.manifest.tensors)
        for name in names:
            if name in in_parts:
                result[name] = self.read_rows(name, 0, in_parts[name][-1][1])
        for shard in self.manifest.shards:
            here = [name for name in shard.tensors if name in names]
            if here:
                result |= read_shard(self.path, shard, here)
        missing = [name for name in names if name not in result]
        if missing:
            raise StateError(
                f"the checkpoint {self.path} lacks {counted(len(missing), 'tensor')}",
                numbers=", ".join(missing[:8]),
                remedy="a checkpoint of the same model",
            )
        return result


def checkpoints_in(run: Path) -> list[Checkpoint]:
    """The complete checkpoints of the run's folder, or of its `checkpoints` folder; newest first."""
    folder = run / FOLDER if (run / FOLDER).is_dir() else run
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
    return [Checkpoint(p) for p in sorted(found, key=lambda p: p.name, reverse=True)]


def newest_good(run: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """(the newest checkpoint of `run` whose every byte is as written, why each newer one was passed over)."""
    passed = []
    for checkpoint in checkpoints_in(run):
        try:
            checkpoint.check()
        except StateError as e:
            passed.append(f"passed over {checkpoint.label}: {e.what}")
            continue
        return checkpoint, tuple(passed)
    return None, tuple(passed)


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`, every byte checked; StateError says what is wrong with it."""
    checkpoint = Checkpoint(path)
    checkpoint.check()
    return checkpoint


def commit(files: Files, partial: Path, manifest: Manifest) -> Path:
    """Make the complete folder `partial` a checkpoint: the manifest, then one rename. Returns its path.

    One that is there already for the same samples stays, being the same, unless it is damaged. Raises
    StateError where a shard is not in this folder: devices wrote to folders of their own.
    """
    for shard in manifest.shards:
        if not (partial / shard.file).is_file():
            raise StateError(
                f"{shard.device} wrote its shard where this process does not see it",
                numbers=str(partial / shard.file),
                remedy="--run-dir on a file system that all hosts share",
            )
    file = files.create(partial / MANIFEST)
    try:
        file.write(memoryview(sealed(manifest)))
        file.sync()
    finally:
        file.close()
    files.sync_folder(partial)
    final = partial.parent / name_of(manifest.position.samples_seen)
    if final.exists():  # from before the run was taken up again at an older one
        if _is_good(final):
            files.remove(partial)
            return final
        set_aside(files, final)
    files.rename(partial, final)
    files.sync_folder(partial.parent)
    return final


def _is_good(path: Path) -> bool:
    try:
        Checkpoint(path).check()
    except StateError:
        return False
    return True


def set_aside(files: Files, path: Path) -> None:
    """Remove the checkpoint at `path`, renamed first, so that no half of it ever has its name."""
    aside = path.parent / f".{path.name}.aside.partial"
    files.remove(aside)
    files.rename(path, aside)
    files.sync_folder(path.parent)
    files.remove(aside)


def remove_partial(files: Files, folder: Path) -> list[str]:
    """Remove what writers left that never finished; the names."""
    left = [p for p in folder.iterdir() if _PARTIAL.fullmatch(p.name)] if folder.is_dir() else []
    for path in left:
        files.remove(path)
    return [p.name for p in left]


def to_prune(numbers: Sequence[int], keep_last: int, keep_every: int = 0) -> list[int]:
    """Which of a run's checkpoints go, by number: all but the last `keep_last` and every `keep_every`-th.

    Example: to_prune([1, 2, 3, 4, 5, 6], 2, 3) is [1, 2, 4]: 5 and 6 are the last, 3 is a third.
    """
    kept = set(sorted(numbers)[-keep_last:])
    return [n for n in sorted(numbers) if n not in kept and not (keep_every and n % keep_every == 0)]


def prune(files: Files, folder: Path, keep_last: int, keep_every: int = 0) -> list[str]:
    """Remove the checkpoints that `to_prune` names, but none that cannot be read. The names removed."""
    by_number: dict[int, Path] = {}
    for checkpoint in checkpoints_in(folder):
        try:
            by_number.setdefault(checkpoint.manifest.number, checkpoint.path)
        except StateError:
            continue
    gone = [by_number[n] for n in to_prune(list(by_number), keep_last, keep_every)]
    for path in gone:
        set_aside(files, path)
    return [p.name for p in gone]
