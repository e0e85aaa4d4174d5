"""Reading and writing the JSON files between the parts. Files are replaced whole, never half-written."""

import codecs
import io
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from evener.core.words import in_bytes
from evener.errors import FileError

T = TypeVar("T")
MAX_BYTES = 256 * 2**20
EXAMPLES = {
    "fleet": "examples/fleets/8-4-2-2.json is one",
    "plan": "examples/plans/finetune.json is one",
    "profile": "evener profile writes one",
}
"""Where a valid file of each type is to be seen."""
_ROOM = "a folder with room that you may write to"


def read(path: str | Path, shape: type[T]) -> T:
    """The structure of type `shape` in the file at `path`.

    Raises FileError naming the file, the place inside it and what was expected there.
    """
    return decode(read_bytes(path), shape, str(path))


def read_bytes(path: str | Path, most: int = MAX_BYTES) -> bytes:
    """All of the file at `path`, at most `most` bytes; FileError for a larger one, and for /dev/zero.

    Bytes are counted as they come: devices and pipes have no size to ask for.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(most + 1)
    except OSError as e:
        raise FileError(f"cannot read {path}: {e.strerror}", remedy="check the path") from e
    if len(raw) > most:
        raise FileError(f"{path} is larger than {in_bytes(most)}", remedy="a smaller file")
    return raw


def decode(raw: bytes, shape: type[T], where: str) -> T:
    """The structure of type `shape` in `raw`; `where` names the source in errors.

    A mark of UTF-8 at the beginning, which some editors write, is passed over.
    """
    raw = raw.removeprefix(codecs.BOM_UTF8)
    name = shape.__name__.removesuffix("File").lower()
    try:
        return msgspec.json.decode(raw, type=shape)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as e:  # a file of brackets
        fields = ", ".join(f.name for f in msgspec.structs.fields(shape))  # type: ignore[arg-type]
        example = f"; {EXAMPLES[name]}" if name in EXAMPLES else ""
        raise FileError(
            f"{where} is no valid {name} file: {_placed(str(e), raw)}",
            remedy=f"a JSON object with the fields {fields}{example}",
        ) from e


def _placed(message: str, raw: bytes) -> str:
    """The message with a line in the place of a byte. Example: "… (byte 4)" is "… (line 2, column 1)"."""

    def line_of(found: re.Match[str]) -> str:
        *lines, last = raw[: int(found[1])].split(b"\n")
        return f"(line {len(lines) + 1}, column {len(last) + 1})"

    return re.sub(r"\(byte (\d+)\)", line_of, message)


def encode(value: object) -> bytes:
    """`value` as indented JSON with a final newline; the same value gives the same bytes."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def write(path: str | Path, value: object) -> None:
    """Write `value` as JSON to `path`: a temporary file beside it, then one rename."""
    write_bytes(path, encode(value))


def write_bytes(path: str | Path, raw: bytes) -> None:
    """Replace the file at `path` by `raw` in one step; FileError where something else is there."""
    path = Path(path)
    try:
        _check_regular(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as f:
                f.write(raw)
                os.fchmod(f.fileno(), _mode())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as e:
        raise cannot_write(path, e) from e


def readable(path: str | Path) -> None:
    """Let those read the file at `path` who may read any new one: safetensors writes for its owner alone."""
    os.chmod(path, _mode())


def _mode() -> int:
    """Of a new file under this process's umask. Example: 0o644 under 022, 0o600 under 077.

    Linux tells the umask. Elsewhere it can only be set and set back: a file that another thread makes in
    between is for its owner alone.
    """
    with suppress(OSError):
        found = re.search(rb"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_bytes(), re.MULTILINE)
        if found:
            return 0o666 & ~int(found[1], 8)
    umask = os.umask(0o077)
    os.umask(umask)
    return 0o666 & ~umask


def check_target(path: str | Path | None) -> None:
    """FileError where no file could be written at `path`, if there is one: before the work that it is for."""
    if path is None:
        return
    try:
        _check_regular(Path(path))
        folder = next(p for p in Path(path).absolute().parents if p.exists())
        is_folder = folder.is_dir()
    except OSError as e:  # a name that is too long, a folder that may not be looked into
        raise cannot_write(path, e) from e
    if not is_folder or not os.access(folder, os.W_OK | os.X_OK):
        what = "is not yours to write to" if is_folder else "is no folder"
        raise FileError(f"cannot write {path}: {folder} {what}", remedy=_ROOM)


def _check_regular(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise FileError(f"{path} is no regular file, and would be replaced by one", remedy="another name")


def append(path: str | Path, raw: bytes) -> None:
    """Add `raw` to the end of the file at `path`, whole or not at all; FileError where it finds no room."""
    try:
        with Path(path).open("ab", buffering=0) as file:
            append_to(file, raw)
    except OSError as e:
        raise cannot_write(path, e) from e


def append_to(file: io.FileIO, raw: bytes) -> None:
    """Add `raw` to the end of an open file without a buffer, whole or not at all; OSError if not."""
    end, rest = file.seek(0, os.SEEK_END), memoryview(raw)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        with suppress(OSError):
            file.truncate(end)
        raise


def cannot_write(path: str | Path, error: OSError) -> FileError:
    """The error for a file that could not be written."""
    return FileError(f"cannot write {path}: {error.strerror}", remedy=_ROOM)
