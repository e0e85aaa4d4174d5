"""What an error of a model tells: in which part of it it arose, and what is behind it."""

from collections.abc import Mapping

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


def misplaced(error: BaseException, otherwise: str) -> str:
    """What to do about an error that says that tensors lie on two devices; `otherwise` for other errors."""
    if "same device" not in str(error):
        return otherwise
    return (
        "a tensor was left behind: keep it as a parameter or with register_buffer so that it moves with its "
        "module, put modules in a ModuleList and not in a list, or give it .to(x.device)"
    )


def tells_of_full_memory(error: BaseException) -> bool:
    """Whether `error` says that memory is full; a CPU's allocator and drivers only raise RuntimeError.

    Example: RuntimeError("CUDA error: out of memory") does.
    """
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _FULL)
