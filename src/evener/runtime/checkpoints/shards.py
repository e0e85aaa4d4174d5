"""One device's tensors as a safetensors file, written in one pass with its checksum.

    8 bytes: length n of the header │ n bytes of JSON: name → dtype, shape, offsets │ tensors, back to back

The library writes from a second copy of everything in memory and hashes nothing; here the staged tensors go
straight to the file, in pieces, so that a writing thread never holds the interpreter for long. It reads them.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from evener.errors import ModelError, StateError
from evener.runtime.checkpoints.files import Files
from evener.runtime.checkpoints.manifest import OLDER, Shard, TensorInfo
from evener.runtime.raw import raw

PIECE_BYTES = 4 * 2**20
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Later:
    """A tensor that is read when its turn to be written comes; `like`, on the meta device, is its shape."""

    like: Tensor
    read: Callable[[], Tensor]


def info_of(name: str, tensor: Tensor) -> TensorInfo:
    """Shape and dtype of `tensor` in safetensors' words; ModelError for what such a file cannot hold."""
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
        raise ModelError(
            f"{name} is {tensor.dtype} in layout {tensor.layout}, which a checkpoint cannot hold",
            remedy=f"dense tensors of {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}",
        )
    return TensorInfo(dtype=DTYPES[tensor.dtype], shape=tuple(tensor.shape))


def write_shard(
    files: Files,
    path: Path,
    tensors: Mapping[str, Tensor | Later],
    device: str,
    statistics: Mapping[str, float] | None = None,
    pause: Callable[[], None] = lambda: None,
) -> Shard:
    """Write contiguous host tensors to `path` and sync it; `pause()` is called between pieces.

    Raises OSError as the disk does.
    """
    shapes = {name: t.like if isinstance(t, Later) else t for name, t in tensors.items()}
    # Wide elements first: every tensor then begins at a multiple of its element's size.
    order = sorted(tensors, key=lambda n: -shapes[n].element_size())
    infos = {name: info_of(name, shapes[name]) for name in order}
    digest, total = hashlib.sha256(), 0
    file = files.create(path)
    try:
        for piece in _pieces({name: tensors[name] for name in order}, shapes, infos):
            file.write(piece)
            digest.update(piece)
            total += len(piece)
            pause()
        file.sync()
    finally:
        file.close()
    return Shard(
        file=path.name,
        device=device,
        num_bytes=total,
        sha256=digest.hexdigest(),
        tensors=infos,
        statistics=dict(statistics or {}),
    )


def _pieces(
    tensors: Mapping[str, Tensor | Later], shapes: Mapping[str, Tensor], infos: Mapping[str, TensorInfo]
) -> Iterator[memoryview]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in tensors:
        start, end = end, end + shapes[name].nbytes
        header[name] = {"dtype": infos[name].dtype, "shape": infos[name].shape, "data_offsets": (start, end)}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        data = memoryview(bytes_of(tensor.read() if isinstance(tensor, Later) else tensor))
        for start in range(0, len(data), PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]


def bytes_of(tensor: Tensor):
    """The bytes of a contiguous host tensor as a numpy array that shares its memory."""
    return raw(tensor).numpy()


def check_shard(folder: Path, shard: Shard) -> None:
    """StateError where the file of `shard` is missing, cut short, no plain file, or has flipped bits."""
    path = folder / shard.file
    try:
        if not path.is_file() or path.is_symlink():
            raise StateError(f"the shard {path} is missing", numbers=f"written by {shard.device}")
        size = path.stat().st_size
        if size != shard.num_bytes:
            raise StateError(
                f"the shard {path} is {'truncated' if size < shard.num_bytes else 'too long'}",
                numbers=f"{size} bytes of {shard.num_bytes}",
                remedy=OLDER,
            )
        with path.open("rb") as f:
            digest = hashlib.file_digest(f, "sha256").hexdigest()
    except OSError as e:
        raise StateError(f"cannot read the shard {path}: {e.strerror}") from e
    if digest != shard.sha256:
        raise StateError(
            f"the shard {path} is damaged: its checksum is another",
            numbers=f"sha256 {digest[:16]}…, written as {shard.sha256[:16]}…",
            remedy=OLDER,
        )


def read_shard(folder: Path, shard: Shard, names: list[str]) -> dict[str, Tensor]:
    """The tensors `names` of `shard`, on the host."""
    path = folder / shard.file
    try:
        with safe_open(path, framework="pt") as f:
            found = {name: f.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as e:
        raise StateError(f"cannot read the shard {path}: {e}", remedy=OLDER) from e
    for name, tensor in found.items():
        if info_of(name, tensor) != shard.tensors[name]:
            raise StateError(
                f"{name} in {path} is not what the manifest says",
                numbers=f"{info_of(name, tensor)} for {shard.tensors[name]}",
            )
    return found


def read_slice(folder: Path, shard: Shard, name: str, start: int, stop: int) -> Tensor:
    """Rows `start` to `stop` of the tensor `name`, on the host; no more of it is read."""
    path = folder / shard.file
    try:
        with safe_open(path, framework="pt") as f:
            return f.get_slice(name)[start:stop]
    except (OSError, SafetensorError) as e:
        raise StateError(f"cannot read the shard {path}: {e}", remedy=OLDER) from e


def read_values(folder: Path, shard: Shard, name: str, start: int, stop: int) -> Tensor:
    """Values `start` to `stop` of the tensor `name`, laid end to end, on the host; no more of it is read."""
    path = folder / shard.file
    try:
        with safe_open(path, framework="pt") as f:
            return f.get_tensor(name).reshape(-1)[start:stop]  # of a file mapped into memory
    except (OSError, SafetensorError) as e:
        raise StateError(f"cannot read the shard {path}: {e}", remedy=OLDER) from e
