"""torch.rehearsal: what torch and programs ask of a device's module; and the answers of torch.accelerator."""

import contextlib
from collections import OrderedDict
from typing import Any

import torch

from evener.rehearsal.device import clock as clocks
from evener.rehearsal.device.card import Card
from evener.rehearsal.device.memory import Counted


class OfDevice:
    """torch.Stream and torch.Event of the device of this process; classes, since others inherit from them."""

    module: "DeviceModule"

    class Stream(clocks.Stream):
        def __init__(self, *device: Any, **more: Any) -> None:
            clock = OfDevice.module.card.clock
            super().__init__(clock, clock.next_name())
            clock.add(self)

    class Event(clocks.Event):
        def __init__(self, *device: Any, enable_timing: bool = False, **more: Any) -> None:
            super().__init__(OfDevice.module.card.clock, enable_timing=enable_timing)


class DeviceModule:
    """torch.rehearsal, for the one device of this process."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.Event, self.Stream = OfDevice.Event, OfDevice.Stream
        OfDevice.module = self

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        """Nothing to set: there is one device."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def device(self, index: Any) -> contextlib.AbstractContextManager[None]:
        """A context in which the device is the current one, which it is."""
        return contextlib.nullcontext()

    # Random numbers are the host's: one generator for both.
    def manual_seed_all(self, seed: int) -> None:
        """torch.manual_seed has seeded the host's generator, which this device draws from."""

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self) -> bool:
        return True

    def synchronize(self, device: Any = None) -> None:
        """The host waits for all that is queued."""
        self.card.clock.synchronize()

    def current_stream(self, device: Any = None) -> clocks.Stream:
        return self.card.clock.stream

    def stream(self, stream: clocks.Stream) -> clocks.Stream:
        """A context in which what is queued goes to `stream`."""
        return stream

    def set_stream(self, stream: clocks.Stream) -> None:
        """From now on what this thread queues goes to `stream`."""
        self.card.clock.stream = stream

    def memory_stats(self, device: Any = None) -> OrderedDict[str, int]:
        """The allocator's figures under the names that torch.accelerator.memory_stats has for them."""
        memory = self.card.memory
        found: dict[str, int] = {
            "inactive_split_bytes.all.current": memory.reserved_unused,
            "num_alloc_retries": memory.num_retries,
            "num_ooms": memory.num_failures,
        }
        for name, counted in (
            ("allocated_bytes", memory.used),
            ("active_bytes", memory.used),
            ("requested_bytes", memory.requested),
            ("reserved_bytes", memory.reserved),
        ):
            found |= _flat(f"{name}.all", counted)
        return OrderedDict(sorted(found.items()))

    def memory_allocated(self, device: Any = None) -> int:
        return self.card.memory.used.current

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.card.memory.used.peak

    def memory_reserved(self, device: Any = None) -> int:
        return self.card.memory.reserved.current

    def max_memory_reserved(self, device: Any = None) -> int:
        return self.card.memory.reserved.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.card.memory.reset_peaks()

    def empty_cache(self) -> None:
        self.card.memory.empty_cache()

    def get_memory_info(self, device: Any = None) -> tuple[int, int]:
        """(free bytes, bytes in all). Example: 10 GiB with 1 GiB reserved: (9 GiB, 10 GiB)."""
        total = self.card.total_bytes or torch.iinfo(torch.int64).max
        return total - self.card.framework_bytes - self.card.memory.reserved.current, total


def _flat(name: str, counted: Counted) -> dict[str, int]:
    return {f"{name}.{field}": getattr(counted, field) for field in ("current", "peak", "allocated", "freed")}


_ANSWERED = (
    "synchronize",
    "memory_stats",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "reset_peak_memory_stats",
    "empty_cache",
    "get_memory_info",
    "current_stream",
    "set_stream",
)


def answer_for_accelerator(module: DeviceModule) -> None:
    """torch.accelerator's calls answer for this device; a backend in Python cannot answer them otherwise."""
    for name in _ANSWERED:
        setattr(torch.accelerator, name, getattr(module, name))
    torch.accelerator.set_device_index = module.set_device
    torch.Stream, torch.Event = OfDevice.Stream, OfDevice.Event  # type: ignore[assignment,misc]
