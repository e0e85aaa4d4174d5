"""Operations that change a tensor's own sizes in place: the shell must follow the values."""

from typing import Any

from evener.rehearsal.device.tensor import RehearsalTensor


def _again_on_shell(dispatcher: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Do it to the values, then give the shell the sizes that they have now."""
    shell = args[0]
    func(shell.content, *args[1:], **kwargs)
    return refresh(dispatcher, shell)


def _set_(dispatcher: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """`set_` takes another's storage, or an empty one."""
    shell, *rest = args
    func(shell.content, *(x.content if isinstance(x, RehearsalTensor) else x for x in rest), **kwargs)
    return refresh(dispatcher, shell)


def refresh(dispatcher: Any, shell: RehearsalTensor) -> RehearsalTensor:
    """Give `shell` the sizes of the values behind it, and the room that they have now."""
    room = dispatcher.card.room(shell.content.untyped_storage())
    shell.resize_shell()
    shell.room = room
    return shell


RESHAPES = {
    **dict.fromkeys(
        ("t_", "squeeze_", "unsqueeze_", "transpose_", "as_strided_", "swapdims_", "resize_", "resize_as_"),
        _again_on_shell,
    ),
    "set_": _set_,
}
"""The operations that change a tensor's sizes, by name."""
