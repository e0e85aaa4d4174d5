"""Wishes about where layers run: patterns of layer names to devices, kinds or the CPU."""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from evener.core.fleet import Device, Fleet
from evener.core.profile import Profile
from evener.errors import UnknownNameError, UsageError


def matching(pattern: str, names: tuple[str, ...]) -> tuple[int, ...]:
    """Numbers of the layers a pattern means: a name, what lies under it, a range or a wildcard.

    Example: "blocks.0-5" means blocks.0 to blocks.5, "embed" also embed.tokens, "*.norm" any that ends so.
    """
    wanted = tuple(_spelt_out(pattern))
    return tuple(
        i
        for i, name in enumerate(names)
        if any(fnmatchcase(name, w) or name.startswith(f"{w}.") for w in wanted)
    )


def _spelt_out(pattern: str) -> Iterator[str]:
    found = re.fullmatch(r"(.*?)(\d+)-(\d+)(.*)", pattern)
    if not found or int(found[3]) < int(found[2]):
        yield pattern
        return
    for number in range(int(found[2]), int(found[3]) + 1):
        yield f"{found[1]}{number}{found[4]}"


def banned_layers(place: Mapping[str, str], fleet: Fleet, profile: Profile) -> dict[str, frozenset[int]]:
    """Layers (by number) that each device must not hold, because they are wished elsewhere.

    UnknownNameError for a pattern without a layer or a target without a device; UsageError when two wishes
    leave a layer no device.
    """
    names = tuple(x.name for x in profile.layers)
    banned: dict[str, set[int]] = {d.name: set() for d in fleet.devices}
    for pattern, target in place.items():
        layers = matching(pattern, names)
        if not layers:
            raise UnknownNameError(
                f"no layer matches {pattern!r}", remedy=f"names or patterns of: {', '.join(names[:20])}"
            )
        chosen = [d for d in fleet.devices if _is(d, target)]
        if not chosen:
            raise UnknownNameError(
                f"no device, kind or type is called {target!r}, where {pattern!r} is to be placed",
                remedy=f"one of: {_targets(fleet)}",
            )
        for device in fleet.devices:
            if device not in chosen:
                banned[device.name] |= set(layers)
    for i, name in enumerate(names):
        if all(i in held for held in banned.values()):
            raise UsageError(f"the wishes leave layer {name!r} no device", remedy="wishes that agree")
    return {name: frozenset(held) for name, held in banned.items()}


def _is(device: Device, target: str) -> bool:
    return target in (device.name, device.kind) or (target == "cpu" and device.type == "cpu")


def _targets(fleet: Fleet) -> str:
    names = [*(d.name for d in fleet.devices), *(d.kind for d in fleet.devices), "cpu"]
    return ", ".join(dict.fromkeys(names))
