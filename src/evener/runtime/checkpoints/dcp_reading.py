"""What a checkpoint of `torch.distributed.checkpoint` (DCP) holds, read without running anything in it.

    .metadata          a pickle: names, shapes, and where in which file each part of a tensor lies
    __0_0.distcp       parts, each a file of `torch.save`, one behind the other

A pickle may name any function for its reader to call. Here it may name the few classes of which DCP's
metadata is made, and gets a stand-in without behaviour for each; anything else is refused. Its opcodes are
looked through before, so that the reading ends. What comes out is checked before it is used: numbers, plain
file names in the folder, parts that fit into tensors and files.
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
MOST_BYTES = 32 * 2**20  # of metadata: 100,000 tensors of one part are 25 MB, their opcodes 11.2 million
MOST_OPCODES = 12 * 2**20  # looked through in 7 s
_MOST = 2**48
_MOST_NUMBER_BYTES = 2**20
_NAMES_MOST = 512
_MOST_VALUES = 1000  # of a tuple: a shape, or the way to a tensor through dicts
_MOST_TEXT = 4096  # characters of a text: a name, or a path
_MOST_DIMS = 64  # torch's own


class _Part:
    """Stands for an object of torch's: its state, and nothing that could run."""

    state: Any = None

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, key: str) -> Any:
        return self.state[key]


class _Size(_Part):
    """Is no tuple: only the opcodes of tuples make those."""

    values: Any = None

    def __init__(self, values: Any) -> None:
        self.values = values


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
    ("torch", "Size"): _Size,
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    **{(f"pathlib{sub}", f"{kind}Path"): _Part for sub in ("", "._local") for kind in ("Posix", "Windows")},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KINDS:
            raise pickle.UnpicklingError(f"it names {printable(module)}.{printable(name)}")
        return _KINDS[module, name]


# The opcodes of what DCP writes: how many things each takes from the stack (None: all to the last mark), and
# whether what it puts there may be a key of a dict (None: puts nothing). POP, DUP and sets are not admitted.
_OPCODES: dict[str, tuple[int | None, bool | None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), (0, None)),
    **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"), (0, False)),
    **dict.fromkeys(("BINFLOAT", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT"), (0, False)),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE"), (0, True)),
    **{f"TUPLE{n}": (n, False) for n in (1, 2, 3)},
    "TUPLE": (None, False),
    "STACK_GLOBAL": (2, False),
    **dict.fromkeys(("NEWOBJ", "REDUCE"), (2, True)),  # make a `_Part`, or fail
    **dict.fromkeys(("BUILD", "APPEND"), (1, None)),  # what they change stays
    "SETITEM": (2, None),
    **dict.fromkeys(("APPENDS", "SETITEMS"), (None, None)),
}


def _check(raw: bytes) -> None:
    """ValueError where `raw` has opcodes, or keys of dicts, that DCP does not write: reading might not end.

    A key may be a text or one of our stand-ins, whose hashes nobody can choose. Without this a hundred bytes
    are a tuple of one tuple twice, and so on, whose hash takes 2^depth steps, and integers can be chosen that
    all have one hash. Follows the opcodes without making anything, in at most `MOST_OPCODES` steps.
    """
    stack: list[bool] = []  # of each thing on the unpickler's stack: may it be a key
    marks = [0]
    memo: list[bool] = []
    for step, (op, arg, _) in enumerate(pickletools.genops(raw)):
        if step == MOST_OPCODES:
            raise ValueError(f"more than {MOST_OPCODES} opcodes in {len(raw)} bytes")
        name = op.name
        if name == "MEMOIZE":
            memo.append(stack[-1])
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[int(arg)])  # type: ignore[arg-type]
        elif name == "MARK":
            marks.append(len(stack))
        elif name not in _OPCODES:
            raise ValueError(f"it has the opcode {name}")
        else:
            takes, makes = _OPCODES[name]
            if isinstance(arg, str) and len(arg) > _MOST_TEXT:
                raise ValueError(f"a text of {len(arg)} characters, more than {_MOST_TEXT}")
            first = marks.pop() if takes is None else len(stack) - takes
            if not marks or first < marks[-1]:
                raise ValueError("it takes more than there is")
            if name in ("SETITEM", "SETITEMS") and not all(stack[first::2]):
                raise ValueError("a key is neither text nor an object")
            if name == "TUPLE" and len(stack) - first > _MOST_VALUES:
                raise ValueError(f"a tuple of {len(stack) - first} values, more than {_MOST_VALUES}")
            del stack[first:]
            if makes is not None:
                stack.append(makes)


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
        _check(raw)
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
    where: dict[tuple[str, str], Part] = {}  # offsets as text: its hash cannot be chosen
    sizes: dict[str, int] = {}
    for index, info in metadata["storage_data"].items():
        if info.state.get("transform_descriptors"):
            raise ValueError("its files are transformed, compressed perhaps")
        found = Part(file=info["relative_path"], start=info["offset"], length=info["length"])
        _check_place(found, folder, sizes)
        offset = index.state.get("offset")
        if type(index["fqn"]) is not str:
            raise TypeError("a place is of no name")
        where[index["fqn"], str(offset if offset is None else _numbers(offset))] = found
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
            yield Stored(name=name, parts=(where[name, "None"],))
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
        found = where[name, str(offsets)]
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
    if isinstance(found, _Size):
        found = found.values
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
