"""What it takes to keep parameters or optimiser state in the memory of a device's host, or on its disk."""

from collections.abc import Sequence

from evener.core.figures import Figure
from evener.core.fleet import Disk, Fleet

_LARGE = 2**28
_PASSES = (3.0, 8.0, 21.0)
"""Values read and written for each one that an optimiser moves, by tensors of state: torch 2.13's own loops
on a CPU. SGD adds (2 + 1); with momentum it multiplies (2), adds (3), adds (3); AdamW decays (2), mixes (3),
multiplies (2), adds a square (4), takes a root (2), divides (2), adds (2), moves (4)."""


def host_bytes_per_s(fleet: Fleet, name: str) -> Figure | None:
    """Bytes a second that the host of device `name` reads and writes; None without a link to it.

    Measured where the fleet names the host's one CPU with it; else the rate of the link is assumed: a host's
    memory feeds it at the least. Example: a link of 12 GB/s and no CPU: 12 GB/s, assumed.
    """
    link = fleet.host_link(name)
    if link is None:
        return None
    cpu = fleet.host_cpu(fleet.device(name).host)
    if cpu is not None and cpu.bytes_per_s is not None:
        return cpu.bytes_per_s
    rate = _LARGE / (link.curve.seconds(2 * _LARGE) - link.curve.seconds(_LARGE))
    return Figure(value=rate, source="assumed", note="as fast as the link to the host")


def host_room(fleet: Fleet, name: str) -> float:
    """Bytes that the host of device `name` may hold for it: of its CPU's memory what is free, or all of it.

    0 where the fleet does not name the host's one CPU with its memory. Example: 64 GB, 50 free: 50 GB.
    """
    cpu = fleet.host_cpu(fleet.device(name).host)
    known = (cpu.free_memory_bytes or cpu.memory_bytes) if cpu else None
    return known.value if known else 0.0


def host_disk(fleet: Fleet, name: str) -> Disk | None:
    """The disk of the host of device `name`, as the fleet says it with the host's one CPU."""
    cpu = fleet.host_cpu(fleet.device(name).host)
    return cpu.disk if cpu else None


def step_passes(num_states: float) -> float:
    """How often an optimiser's step on a CPU reads or writes a value, with `num_states` tensors of state.

    Example: AdamW, with two, 21 times; SGD, with none, 3 times.
    """
    low = min(int(num_states), len(_PASSES) - 2)
    return _PASSES[low] + (num_states - low) * (_PASSES[low + 1] - _PASSES[low])


def run_whole(names: Sequence[str]) -> list[bool]:
    """Which of a stage's layers run as a whole, and so may come and go: not what opened containers hold.

    Example: "(root)", "blocks", "blocks.0": False, False, True.
    """
    parts = [name.split(".") for name in names]
    opened = {".".join(p[:k]) for p in parts for k in range(1, len(p))}
    return [name != "(root)" and name not in opened for name in names]
