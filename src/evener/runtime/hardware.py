"""The plain driver: work runs on the device at its own speed, timed by the host's monotonic clock."""

import resource
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import torch

from evener.core.figures import Figure

_STREAMED = ("cuda", "xpu")  # whose streams can be waited for one by one


class HardwareDriver:
    """Runs actions on a real device; the clock is the host's.

    On an accelerator an action ends when what it queued on the current stream is done, so that its time is
    the device's time and not the time to queue it. Copies on other streams may go on.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_accelerator = device.type != "cpu"

    def now(self) -> float:
        """Seconds of the host's monotonic clock."""
        return time.monotonic()

    def run(self, action: str, work: Callable[[], Any], *, signature: Hashable = ()) -> Any:
        """Do `work`, wait until the device is done, return its result."""
        result = work()
        if self.device.type in _STREAMED:
            torch.accelerator.current_stream(self.device).synchronize()
        elif self._on_accelerator:
            torch.accelerator.synchronize(self.device)
        return result

    def on_host(self, work: Callable[[], Any]) -> Any:
        """Do `work`: it takes the time that it takes."""
        return work()

    def on_disk(self, read: int, written: int) -> None:
        """Nothing is left to do: it took the time that it took."""


ALLOCATED = "by torch's allocator"


def peak_bytes(device: torch.device) -> Figure:
    """The most bytes held so far: by the allocator of an accelerator, on a CPU by the whole process."""
    if device.type != "cpu" and (held := torch.accelerator.max_memory_allocated(device)):
        return Figure(value=held, source="measured", note=ALLOCATED)
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Figure(value=kib * 1024, source="measured", note="whole process, framework included")


def open_torch_device(type_: str, index: int | None, threads: int | None) -> torch.device:
    """The torch device of a fleet entry, made current; for a CPU its number of threads is set."""
    if type_ == "cpu":
        if threads:
            torch.set_num_threads(threads)
            with suppress(RuntimeError):  # can be set once a process; then it already is what we want
                torch.set_num_interop_threads(1)
        return torch.device("cpu")
    device = torch.device(type_, index or 0)
    torch.accelerator.set_device_index(device.index)
    return device
