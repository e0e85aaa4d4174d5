"""What a checkpoint says of itself: where the job was, what each shard holds, and checksums of all of it."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from evener.core.figures import Value
from evener.core.files import MAX_BYTES, encode
from evener.core.membership import ScaleState
from evener.errors import StateError
from evener.runtime.checkpoints.rows import wholes
from evener.runtime.checkpoints.values import joined

FORMAT = 1
MANIFEST = "manifest.json"
OLDER = "an older checkpoint of the run"
SHARD_FILE = re.compile(r"shard-\d{5}-of-\d{5}\.safetensors")


class TensorInfo(Value, frozen=True, kw_only=True):
    """Shape and dtype of a tensor; the dtype is spelt as in safetensors, "F32"."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Shard(Value, frozen=True, kw_only=True):
    """One file of a checkpoint: the device that wrote it, its size, its checksum and the tensors in it.

    `statistics` has, for each tensor of BatchNorm that this device has values of its own of, its part of the
    samples: 0.25 of them counts a quarter in the mean over all devices.
    """

    file: str
    device: str
    num_bytes: int
    sha256: str
    tensors: dict[str, TensorInfo]
    statistics: dict[str, float] = {}


class Position(Value, frozen=True, kw_only=True):
    """Where in its data a job is, and what the order of samples follows from."""

    step: int
    samples_seen: int
    seed: int
    global_batch: int
    dataset_size: int
    shuffle: bool = True


class Manifest(Value, frozen=True, kw_only=True):
    """A checkpoint. `number` counts a run's checkpoints from 1; `sha256` is that of this file without it.

    `optimizer` is the class of the optimiser, `model_id` a hash of the model's names, shapes and dtypes.
    `options` has what a loop of one's own needs beside (parameter groups, learning-rate scheduler). `tied`
    has other names of tensors, each with the first. `optimizer` is empty where no state of one is there.
    """

    format: int
    number: int
    position: Position
    optimizer: str
    model_id: str
    shards: tuple[Shard, ...]
    loss_scale: ScaleState | None = None
    options: dict[str, Any] = {}
    tied: dict[str, str] = {}
    written_by: str = ""
    sha256: str = ""

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor of every shard."""
        return {name: info for shard in self.shards for name, info in shard.tensors.items()}

    @property
    def wholes(self) -> dict[str, TensorInfo]:
        """The same with what lies in parts as one tensor each; StateError where a part is missing."""
        return joined(wholes(self.tensors))

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards together."""
        return sum(shard.num_bytes for shard in self.shards)


class _Head(msgspec.Struct):
    format: int


def model_id(tensors: dict[str, TensorInfo]) -> str:
    """A short hash of names, dtypes and shapes of the tensors that are a model's; 12 hexadecimal digits."""
    lines = sorted(f"{name} {info}" for name, info in tensors.items() if name.startswith("model/"))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def sealed(manifest: Manifest) -> bytes:
    """`manifest` as the bytes of its file, with its own checksum in it."""
    bare = msgspec.structs.replace(manifest, sha256="")
    digest = hashlib.sha256(encode(bare)).hexdigest()
    return encode(msgspec.structs.replace(manifest, sha256=digest))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`.

    Raises StateError where it is missing, damaged, of a newer format, or names files it may not.
    """
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_BYTES:
            raise StateError(f"{path} is larger than {MAX_BYTES >> 20} MiB and was not read")
        raw = path.read_bytes()
    except OSError as e:
        raise StateError(f"cannot read the checkpoint {folder}: {e.strerror}", numbers=str(path)) from e
    try:
        head = msgspec.json.decode(raw, type=_Head)
        if head.format > FORMAT:
            raise StateError(
                f"the checkpoint {folder} was written by a newer evener",
                numbers=f"format {head.format}; this version reads up to {FORMAT}",
                remedy="the evener that wrote it, or a newer one",
            )
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as e:
        raise StateError(f"{path} is damaged: {e}", remedy=OLDER) from e
    if sealed(manifest) != raw:
        raise StateError(f"{path} is damaged: its checksum is another", remedy=OLDER)
    for problem in _problems(manifest):
        raise StateError(f"{path} is no manifest of ours: {problem}")
    return manifest


def _problems(manifest: Manifest) -> Iterator[str]:
    seen: dict[str, str] = {}
    files: set[str] = set()
    for shard in manifest.shards:
        if not SHARD_FILE.fullmatch(shard.file) or shard.file in files:
            yield f"{shard.file!r} is no name of a shard, or comes twice"
        files.add(shard.file)
        for name in shard.tensors:
            if name in seen:
                yield f"{name} is in {seen[name]} and in {shard.file}"
            seen[name] = shard.file
    if min(manifest.position.samples_seen, manifest.position.step, manifest.number) < 0:
        yield "a position before the first sample"
