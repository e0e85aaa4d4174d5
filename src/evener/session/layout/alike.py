"""Before anything is summed: do all devices hold the same parameters, in the same shapes and dtypes?

Gloo adds bytes as its caller calls them and ends the process where sizes differ, so devices that disagree
have to find that out first, all of them, and with the parameter's name.
"""

from torch import nn

from evener.core.figures import Value
from evener.errors import ReductionMismatchError
from evener.runtime.ranks import Ranks
from evener.session.meeting import Meeting


class Held(Value, frozen=True, kw_only=True):
    """What one device begins with: by name, dtype and shape in words, "float32 7 x 5"."""

    tensors: dict[str, str]


def check_alike(model: nn.Module, ranks: Ranks, meeting: Meeting) -> None:
    """Compare the parameters and buffers of all devices, each with the whole model before it is cut.

    Called by all devices together. ReductionMismatchError, the same on all of them, names the first one that
    differs and who has it how.
    """
    meeting.put(f"alike/{ranks.here}", Held(tensors=_words(model)))
    told = {d: meeting.get(f"alike/{d}", Held).tensors for d in ranks.devices}
    for name in dict.fromkeys(n for tensors in told.values() for n in tensors):
        by_words: dict[str, list[str]] = {}
        for device in ranks.devices:
            by_words.setdefault(told[device].get(name, "none"), []).append(device)
        if len(by_words) > 1:
            raise ReductionMismatchError(
                f"the devices do not train the same model: {name!r} differs",
                numbers="; ".join(f"{words} on {', '.join(devices)}" for words, devices in by_words.items()),
                remedy="one script that builds the same model, dtype and frozen layers on every device",
            )


def _words(model: nn.Module) -> dict[str, str]:
    found = {}
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        shape = " x ".join(map(str, t.shape)) or "one number"
        frozen = ", frozen" if isinstance(t, nn.Parameter) and not t.requires_grad else ""
        found[name] = f"{str(t.dtype).removeprefix('torch.')} {shape}{frozen}"
    return found
