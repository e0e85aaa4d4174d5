"""In which part of a model an error arose, from the frames that it went through."""

from collections.abc import Mapping


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
