"""Reading and writing the JSON files between the parts. Files are replaced whole, never half-written."""

import os
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec

from evener.errors import FileError

T = TypeVar("T")
MAX_BYTES = 256 * 2**20
EXAMPLES = {
    "fleet": "examples/fleets/8-4-2-2.json is one",
    "plan": "examples/plans/finetune.json is one",
    "profile": "evener profile writes one",
}
"""Where a valid file of each type is to be seen."""


def read(path: str | Path, shape: type[T]) -> T:
    """The structure of type `shape` in the file at `path`.

    Raises FileError naming the file, the place inside it and what was expected there.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise FileError(f"{path} is larger than {MAX_BYTES >> 20} MiB", remedy="a smaller file")
        raw = path.read_bytes()
    except OSError as e:
        raise FileError(f"cannot read {path}: {e.strerror}", remedy="check the path") from e
    return decode(raw, shape, str(path))


def decode(raw: bytes, shape: type[T], where: str) -> T:
    """The structure of type `shape` in `raw`; `where` names the source in errors."""
    name = shape.__name__.removesuffix("File").lower()
    try:
        return msgspec.json.decode(raw, type=shape)
    except (msgspec.DecodeError, msgspec.ValidationError) as e:
        fields = ", ".join(f.name for f in msgspec.structs.fields(shape))  # type: ignore[arg-type]
        example = f"; {EXAMPLES[name]}" if name in EXAMPLES else ""
        raise FileError(
            f"{where} is no valid {name} file: {e}",
            remedy=f"a JSON object with the fields {fields}{example}",
        ) from e


def encode(value: object) -> bytes:
    """`value` as indented JSON with a final newline; the same value gives the same bytes."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def write(path: str | Path, value: object) -> None:
    """Write `value` as JSON to `path`: a temporary file beside it, then one rename."""
    write_bytes(path, encode(value))


def write_bytes(path: str | Path, raw: bytes) -> None:
    """Replace the file at `path` by `raw` in one step; FileError where something else is there."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise FileError(f"{path} is no regular file, and would be replaced by one", remedy="another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as f:
                f.write(raw)
                os.fchmod(f.fileno(), 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as e:
        raise FileError(
            f"cannot write {path}: {e.strerror}", remedy="a folder with room that you may write to"
        ) from e
