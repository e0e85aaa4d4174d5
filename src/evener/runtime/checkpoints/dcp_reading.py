"""What a checkpoint of `torch.distributed.checkpoint` (DCP) holds, read without running anything in it.

    .metadata          a pickle: names, shapes, and where in which file each part of a tensor lies
    __0_0.distcp       parts, each a file of `torch.save`, one behind the other

A pickle may name any function for its reader to call. Here it may name the few classes of which DCP's
metadata is made, and gets a stand-in without behaviour for each; anything else is refused. What comes out is
checked before it is used: numbers, plain file names in the folder, parts that fit into tensors and files.
Parts are read with `weights_only`. No class of torch's is needed, so changes to them do not matter here.
"""

import math
import pickle
import pickletools
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evener.core.files import read_bytes
from evener.core.words import printable
from evener.errors import StateError
from evener.runtime.checkpoints.shards import DTYPES

METADATA = ".metadata"
MOST_BYTES = 64 * 2**20  # of metadata: half a million parts
_MOST = 2**48
_MOST_NUMBER_BYTES = 2**20
_NAMES_MOST = 512
_MOST_VALUES = 1000  # of a tuple: a shape, or the way to a tensor through dicts
_MOST_DIMS = 64  # torch's own


class _Part:
    """Stands for an object of torch's: what it was made of, and nothing that could run."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, key: str) -> Any:
        return self.state[key]


class _Metadata(_Part): ...


class _OfTensor(_Part): ...


class _OfBytes(_Part): ...


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_KINDS: dict[tuple[str, str], Any] = {
    **{("torch.distributed.checkpoint.metadata", name): _Part for name in (
        "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "MetadataIndex", "StorageMeta"
    )},
    ("torch.distributed.checkpoint.metadata", "Metadata"): _Metadata,
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"): _OfTensor,
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"): _OfBytes,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Part,
    ("torch.serialization", "_get_layout"): _Part,
    ("torch", "Size"): tuple,
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    **{(f"pathlib{sub}", f"{kind}Path"): _Part for sub in ("", "._local") for kind in ("Posix", "Windows")},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KINDS:
            raise pickle.UnpicklingError(f"it names {printable(module)}.{printable(name)}")
        return _KINDS[module, name]


def _check_tuples(raw: bytes) -> None:
    """ValueError where a tuple of the pickle has more than `_MOST_VALUES` values, with those of tuples in it.

    The one in which each holds the next twice is short as a pickle, and as a key of a dict its hash takes
    2^depth steps. Follows the opcodes without making anything; places in the memo are counted, as a table up
    to the largest is made.
    Example: (1, (2, 3)) has 5.
    """
    stack: list[int] = []  # values that each thing on the unpickler's stack counts for
    marks: list[int] = []
    memo: dict[int, int] = {}
    for op, arg, _ in pickletools.genops(raw):
        if op.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            place = len(memo) if op.name == "MEMOIZE" else int(arg)  # type: ignore[arg-type]
            if place > len(memo) + 1:
                raise ValueError(f"the place {place} comes after {len(memo)} others")
            memo[place] = stack[-1]
        elif op.name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(arg)])  # type: ignore[arg-type]
        elif op.name == "DUP":
            stack.append(stack[-1])
        elif op.name == "MARK":
            marks.append(len(stack))
        else:
            before = op.stack_before
            is_slice = pickletools.markobject in before
            first = marks.pop() if is_slice else len(stack)
            first -= before.index(pickletools.markobject) if is_slice else len(before)
            if first < 0:
                raise ValueError("it takes more than there is")
            taken, stack[first:] = stack[first:], []
            is_tuple = pickletools.pytuple in op.stack_after
            count = 1 + sum(taken) if is_tuple else 1
            if count > _MOST_VALUES:
                raise ValueError(f"a tuple of more than {_MOST_VALUES} values")
            stack += [count] * len(op.stack_after)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a tensor, or something else that was saved: `length` bytes from `start` on in a file."""

    file: str
    start: int
    length: int
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    def stretch_in(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """(first value, end) of this part in its tensor laid end to end; None where they do not follow.

        Example: rows 2 to 4 of a 5 x 3 are values 6 to 12; columns of it are none.
        """
        wide = next((i for i, size in enumerate(self.sizes) if size != 1), len(shape))
        if self.sizes[wide + 1 :] != shape[wide + 1 :]:
            return None
        start = sum(o * math.prod(shape[i + 1 :]) for i, o in enumerate(self.offsets))
        return start, start + math.prod(self.sizes)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One entry of a DCP checkpoint; what has no dtype is no tensor but something small of Python's."""

    name: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of the tensor; 0 for what is none."""
        return math.prod(self.shape) * self.dtype.itemsize if self.dtype else 0


def read_metadata(folder: Path) -> dict[str, Stored]:
    """What the DCP checkpoint in `folder` holds, by name.

    FileError where its metadata cannot be read, StateError where it is not what DCP writes: it names
    something that is not admitted, or files outside of the folder; parts are missing, or do not fit.
    """
    path = folder / METADATA
    raw = read_bytes(path, MOST_BYTES)
    try:
        _check_tuples(raw)
        metadata = _Unpickler(BytesIO(raw)).load()
        if not isinstance(metadata, _Metadata):
            raise TypeError("it holds something else")
        return {stored.name: stored for stored in _entries(metadata, folder)}
    except StateError:
        raise
    except Exception as e:  # a pickle of others can be wrong in any way
        raise StateError(
            f"{path} is no metadata of torch.distributed.checkpoint, or holds what is not admitted",
            numbers=printable(str(e))[:200],
            remedy="a folder that torch.distributed.checkpoint.save wrote, of tensors and plain numbers",
        ) from e


def read_part(folder: Path, stored: Stored, part: Part) -> Tensor:
    """One part of the tensor `stored`, on the host; StateError where it is not as the metadata says."""
    found = _load(folder, stored.name, part)
    is_fit = type(found) is Tensor and found.dtype is stored.dtype and tuple(found.shape) == part.sizes
    if not is_fit or found.layout is not torch.strided:
        raise _unfit(folder, stored.name, part)
    return found.contiguous()


def read_tensor(folder: Path, stored: Stored) -> Tensor:
    """The tensor `stored`, put together on the host; StateError where a part is not as the metadata says."""
    if len(stored.parts) == 1:
        return read_part(folder, stored, stored.parts[0])
    result = torch.empty(stored.shape, dtype=stored.dtype)
    seen = torch.zeros(stored.shape, dtype=torch.bool)
    for part in stored.parts:
        box = tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))
        result[box], seen[box] = read_part(folder, stored, part), True
    if not seen.all():  # parts have as many values as the tensor: some come twice
        raise StateError(f"parts of {stored.name} in {folder} overlap")
    return result


def read_number(folder: Path, stored: Stored) -> bool | int | float | None:
    """What `stored`, which is no tensor, holds; StateError where it is no number, or none of 64 bits."""
    (part,) = stored.parts
    if part.length > _MOST_NUMBER_BYTES:
        raise _unfit(folder, stored.name, part)
    found = _load(folder, stored.name, part)
    fits = type(found) in (bool, float) or (type(found) is int and -(2**63) <= found < 2**63)
    if found is not None and not fits:
        raise _unfit(folder, stored.name, part)
    return found


def _load(folder: Path, name: str, part: Part) -> Any:
    try:
        with (folder / part.file).open("rb") as file:
            file.seek(part.start)
            raw = BytesIO(file.read(part.length))
        with zipfile.ZipFile(raw) as held:  # torch stores; what is compressed could be of any size
            if any(i.compress_type != zipfile.ZIP_STORED or i.file_size > part.length for i in held.filelist):
                raise ValueError("it is compressed")
        raw.seek(0)
        return torch.load(raw, map_location="cpu", weights_only=True)
    except Exception as e:  # torch raises many kinds for a file that is damaged
        raise _unfit(folder, name, part) from e


def _unfit(folder: Path, name: str, part: Part) -> StateError:
    return StateError(
        f"{name} in {folder} is damaged, or not what its metadata says",
        numbers=f"{part.length} bytes from {part.start} on in {part.file}",
    )


def _entries(metadata: _Metadata, folder: Path) -> Iterator[Stored]:
    where: dict[tuple[str, tuple[int, ...] | None], Part] = {}
    sizes: dict[str, int] = {}
    for index, info in metadata["storage_data"].items():
        if info.state.get("transform_descriptors"):
            raise ValueError("its files are transformed, compressed perhaps")
        found = Part(file=info["relative_path"], start=info["offset"], length=info["length"])
        _check_place(found, folder, sizes)
        offset = index.state.get("offset")
        if type(index["fqn"]) is not str:
            raise TypeError("a place is of no name")
        where[index["fqn"], None if offset is None else _numbers(offset)] = found
    left = len(where)
    for name, entry in metadata["state_dict_metadata"].items():
        if type(name) is not str or not 0 < len(name) <= _NAMES_MOST or not name.isprintable():
            raise ValueError("a name is no short line of text")
        if isinstance(entry, _OfTensor):
            left -= len(entry["chunks"])
            if left < 0:
                raise ValueError("it has more parts of tensors than places for them")
            yield _tensor(name, entry, where)
        elif isinstance(entry, _OfBytes):
            yield Stored(name=name, parts=(where[name, None],))
        else:
            raise TypeError(f"{name} is neither tensor nor bytes")


def _tensor(name: str, entry: _OfTensor, where: dict[Any, Part]) -> Stored:
    properties = entry["properties"].state
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} has no dtype")
    shape = _numbers(entry["size"])
    parts = []
    for chunk in entry["chunks"]:
        offsets, sizes = _numbers(chunk["offsets"]), _numbers(chunk["sizes"])
        found = where[name, offsets]
        ends = [o + s for o, s in zip(offsets, sizes, strict=True)]
        is_within = all(end <= most for end, most in zip(ends, shape, strict=True))
        if not is_within or math.prod(sizes) * dtype.itemsize > found.length:
            raise ValueError(f"a part of {name} does not fit")
        if math.prod(sizes) or not math.prod(shape):
            parts.append(
                Part(file=found.file, start=found.start, length=found.length, offsets=offsets, sizes=sizes)
            )
    if sum(math.prod(part.sizes) for part in parts) != math.prod(shape) or not parts:
        raise ValueError(f"parts of {name} are missing, or too many")
    return Stored(name=name, dtype=dtype, shape=shape, parts=tuple(parts))


def _numbers(found: Any) -> tuple[int, ...]:
    if (
        type(found) is not tuple
        or len(found) > _MOST_DIMS
        or not all(type(n) is int and 0 <= n < _MOST for n in found)
    ):
        raise ValueError("a shape is none")
    return found


def _check_place(part: Part, folder: Path, sizes: dict[str, int]) -> None:
    """ValueError where `part` is not within a plain file of `folder`."""
    name = part.file
    if type(name) is not str or not name.isprintable() or Path(name).name != name:
        raise ValueError("a file lies outside of the folder")
    if name not in sizes:
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise ValueError(f"the file {name} is missing")
        sizes[name] = path.stat().st_size
    _numbers((part.start, part.length))
    if part.start + part.length > sizes[name]:
        raise ValueError(f"the file {name} is truncated: {sizes[name]} bytes")
