"""How much of a device's memory a job may use, as people write it: lab1/gpu0=6GiB."""

from collections.abc import Sequence

from msgspec.structs import replace

from evener.core.figures import Figure
from evener.core.fleet import Fleet
from evener.core.words import in_bytes
from evener.errors import UsageError

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
SPELLING = "lab1/gpu0=6GiB"


def with_budgets(fleet: Fleet, budgets: Sequence[str]) -> Fleet:
    """The same fleet, whose named devices (or host CPUs) have so much memory and no more.

    UsageError for what cannot be read, or is more than a device has; UnknownNameError for another name.
    Example: "lab1/gpu0=6GiB" on a card of 24 GB leaves 6,442,450,944 bytes of it.
    """
    for text in budgets:
        name, equals, size = text.partition("=")
        if not (name and equals):
            lacking = '"=" is missing' if name else "no device stands before the ="
            raise UsageError(
                f"cannot read the budget {text!r}: {lacking}",
                remedy=f"DEVICE=SIZE, as {SPELLING}, with one of {', '.join(_UNITS)}",
            )
        num_bytes = bytes_in(size)
        host = next((h for h in fleet.hosts if h.name == name), None)
        device = host or fleet.device(name)
        if device.memory_bytes is not None and num_bytes > device.memory_bytes.value:
            raise UsageError(
                f"{name} has less memory than its budget",
                numbers=f"memory {in_bytes(device.memory_bytes.value)}, budget {in_bytes(num_bytes)}",
                remedy="a budget within its memory",
            )
        free = device.free_memory_bytes
        told = replace(
            device,
            memory_bytes=Figure(value=num_bytes, source="assumed", note="the job's budget"),
            free_memory_bytes=free if free is not None and free.value < num_bytes else None,
        )
        fleet = replace(
            fleet,
            devices=tuple(told if d.name == name else d for d in fleet.devices),
            hosts=tuple(told if h.name == name else h for h in fleet.hosts),
        )
    return fleet


def bytes_in(text: str) -> float:
    """Bytes of a size with its unit. Example: "1.5GiB" is 1,610,612,736. UsageError for anything else."""
    for unit, size in _UNITS.items():
        number = text.strip().removesuffix(unit)
        if number != text.strip():
            try:
                found = float(number) * size
            except ValueError:
                break
            if 0 < found < float("inf"):
                return found
    raise UsageError(
        f"{text!r} is no size of a memory", remedy=f"{SPELLING}, with one of {', '.join(_UNITS)}"
    )
