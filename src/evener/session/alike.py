"""Before anything is summed: do all devices hold the same parameters, in the same shapes and dtypes?

Gloo adds bytes as its caller calls them and ends the process where sizes differ, so devices that disagree
have to find that out first, all of them, and with the parameter's name.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from evener.core.figures import Value
from evener.errors import ReductionMismatchError
from evener.runtime.ranks import Ranks
from evener.session.meeting import Meeting


class Trained(Value, frozen=True, kw_only=True):
    """What one device trains: by name, dtype and shape in words, "float32 7 x 5"."""

    parameters: dict[str, str]


def check_alike(
    mine: Mapping[str, nn.Parameter],
    holders: Mapping[str, Sequence[str]] | None,
    ranks: Ranks,
    meeting: Meeting,
) -> None:
    """Compare what all devices train; `holders` of a name, by default all devices, must agree on it.

    Called by all devices together. ReductionMismatchError, the same on all of them, names the first parameter
    that differs and who has it how.
    """
    if ranks.world_size == 1:
        return
    trained = {n: _words(p) for n, p in mine.items() if p.requires_grad}
    meeting.put(f"trained/{ranks.here}", Trained(parameters=trained))
    told = {d: meeting.get(f"trained/{d}", Trained).parameters for d in ranks.devices}
    for name in dict.fromkeys(n for parameters in told.values() for n in parameters):
        by_words: dict[str, list[str]] = {}
        for device in ranks.devices if holders is None else holders.get(name, ()):
            by_words.setdefault(told[device].get(name, "not trained"), []).append(device)
        if len(by_words) > 1:
            raise ReductionMismatchError(
                f"the devices do not train the same {name!r}",
                numbers="; ".join(f"{words} on {', '.join(devices)}" for words, devices in by_words.items()),
                remedy="one script that builds the same model, dtype and frozen layers on every device",
            )


def _words(p: nn.Parameter) -> str:
    shape = " x ".join(map(str, p.shape)) or "scalar"
    return f"{str(p.dtype).removeprefix('torch.')} {shape}"
