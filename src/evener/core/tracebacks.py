"""What an error of a model tells: in which part of it it arose, and what is behind it."""

import re
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from evener.core.words import printable

_OTHERS = ("<", f"{Path(__file__).parents[1]}/", f"{sysconfig.get_path('stdlib')}/")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_FILE = re.compile(r'File "([^"\n]+)", line (\d+)')
_MOST = 400  # characters of a message that are shown
_TORCHS = ("torch", "OutOfMemoryError")
_FULL = ("can't allocate memory", "not enough memory", "out of memory")


def raised_in(error: BaseException, names: Mapping[int, str]) -> str:
    """The innermost part of a model whose method `error` passed; empty where it passed none.

    `names` has the parts by their id: `{id(m): name for name, m in model.named_modules()}`. Example: an error
    in the forward of "blocks.1.norm", called by that of "blocks.1", gives "blocks.1.norm".
    """
    found, at = "", error.__traceback__
    while at is not None:
        found = names.get(id(at.tb_frame.f_locals.get("self")), found)
        at = at.tb_next
    return found


def last_line(error: BaseException) -> str:
    """What `error` says, and where in the user's own code it arose.

    Example: "ValueError: sample too large (job.py:12)".
    """
    place = user_line(error)
    return said(error) + (f" ({place})" if place else "")


def said(error: BaseException) -> str:
    """The kind of `error` and the last line of its message; what a terminal might obey is replaced."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {printable(text[-1])[:_MOST] if text else 'no message'}"


def user_line(error: BaseException) -> str:
    """`file:line` of the innermost place in neither evener, the standard library nor an installed package.

    Empty where there is none. An error of a data loader's worker has its places in its message.
    """
    told = [(file, int(line)) for file, line in _FILE.findall(str(error)[:100_000])]
    for file, line in reversed([*_places(error), *told]):
        path = Path(file).as_posix()
        if not path.startswith(_OTHERS) and not any(part in path for part in _INSTALLED):
            return printable(f"{Path(file).name}:{line}")
    return ""


def _places(error: BaseException) -> Iterator[tuple[str, int]]:
    at = error.__traceback__
    while at is not None:
        yield at.tb_frame.f_code.co_filename, at.tb_lineno
        at = at.tb_next


def misplaced(error: BaseException, otherwise: str) -> str:
    """What to do about an error that says that tensors lie on two devices; `otherwise` for other errors."""
    if "same device" not in str(error):
        return otherwise
    return (
        "a tensor was left behind: keep it as a parameter or with register_buffer so that it moves with its "
        "module, put modules in a ModuleList and not in a list, or give it .to(x.device)"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory is full, of a device or of the host.

    torch's own error is known by its name; a CPU's allocator and drivers only raise RuntimeError. Example:
    RuntimeError("CUDA error: out of memory") does.
    """
    if isinstance(error, MemoryError) or any(
        (t.__module__, t.__name__) == _TORCHS for t in type(error).__mro__
    ):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _FULL)
