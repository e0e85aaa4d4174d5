"""Memory that is reserved and holds nothing: watched between steps, given back where it stands in the way.

An allocator that finds no room gives cached memory back and tries again, in the middle of a step and with the
device's work at a stop. Where that happened, the same is done between two steps, where nothing is under way.
"""

from collections import deque
from dataclasses import dataclass

import torch

from evener.core.seams import Driver
from evener.core.words import counted

MOST_SENTENCES = 8


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a device's allocator says between two steps, in bytes; `retries` is how often it tried again."""

    used: int
    peak: int
    reserved: int
    free: int
    retries: int


def held_on(device: torch.device) -> Held:
    """The figures of `device`, an accelerator."""
    stats = torch.accelerator.memory_stats(device)
    return Held(
        used=stats.get("allocated_bytes.all.current", 0),
        peak=stats.get("allocated_bytes.all.peak", 0),
        reserved=stats.get("reserved_bytes.all.current", 0),
        free=torch.accelerator.get_memory_info(device)[0],
        retries=stats.get("num_alloc_retries", 0),
    )


def why_tidy(held: Held, retries_before: int) -> str:
    """The sentence why unused memory is given back now; empty where it stays with the allocator.

    It is given back when the allocator had to try again since `retries_before`, holds memory that is unused,
    and the device has less left than the next step takes anew. Example: 3 GB used, 9 at the peak, 8 reserved
    and 1 free after a retry: 5 GB are unused, and the 6 that come again would not fit beside them.
    """
    unused, again = held.reserved - held.used, held.peak - held.used
    if held.retries <= retries_before or unused <= 0 or held.free >= again:
        return ""
    return (
        f"the allocator found no room {counted(held.retries - retries_before, 'time')} in the last step; "
        f"{unused / 2**20:.4g} MiB are reserved and unused, {held.free / 2**20:.4g} MiB free, "
        f"and {again / 2**20:.4g} MiB are taken again in each step"
    )


class Tidier:
    """Looks at one device between its steps; `sentences` are the reasons, the newest last."""

    def __init__(self, device: torch.device, driver: Driver) -> None:
        self._device, self._driver = device, driver
        self._counts = device.type != "cpu"
        self._retries = 0
        self._took_s = 0.0
        self.sentences: deque[str] = deque(maxlen=MOST_SENTENCES)
        self.times = 0

    def between_steps(self) -> tuple[float, float] | None:
        """Give unused memory back where there is a reason; when that began and ended, for the trace."""
        if not self._counts:
            return None
        held = held_on(self._device)
        why = why_tidy(held, self._retries)
        self._retries = held.retries
        if not why:
            return None
        self.sentences.append(why)
        self.times += 1
        begin_s = self._driver.now()
        self._driver.run("TIDY", torch.accelerator.empty_cache)
        end_s = self._driver.now()
        self._took_s += end_s - begin_s
        return begin_s, end_s

    def told(self) -> str:
        """For the report: how often memory was given back, what that took, and why the last time; or ""."""
        if not self.times:
            return ""
        return (
            f"unused memory was given back between steps {counted(self.times, 'time')}, in "
            f"{self._took_s * 1e3:.3g} ms altogether; the last time because {self.sentences[-1]}"
        )
