"""torch.rehearsal: what torch and programs ask of a device's module; and the answers of torch.accelerator."""

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from evener.rehearsal.device.card import Card
from evener.rehearsal.device.clock import Clock, Stream
from evener.rehearsal.device.memory import Counted
from evener.rehearsal.device.tensor import NAME


class Event:
    """A moment on the device's clock: recorded into a stream, waited for by the host or another stream."""

    def __init__(self, card: Card, *, enable_timing: bool = False) -> None:
        self._card, self._timing = card, enable_timing
        self._at_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """The event happens when all that is queued on the stream (the current one) is done."""
        clock = self._card.clock
        self._at_s = max(clock.host_s, (stream or clock.stream).free_s)

    def query(self) -> bool:
        """Whether the host knows that it happened."""
        return self._at_s is None or self._at_s <= self._card.clock.waited_s

    def synchronize(self) -> None:
        """The host waits for it."""
        if self._at_s is not None:
            self._card.clock.wait(self._at_s)
            self._card.flights.land()

    def wait(self, stream: Stream | None = None) -> None:
        """What is queued on the stream (the current one) from now on waits for it."""
        stream = stream or self._card.clock.stream
        if self._at_s is not None:
            stream.free_s = max(stream.free_s, self._at_s)

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to `end`."""
        if not (self._timing and end._timing) or self._at_s is None or end._at_s is None:
            raise RuntimeError("both events must be recorded, and made with enable_timing=True")
        return (end._at_s - self._at_s) * 1e3


class DeviceModule:
    """torch.rehearsal, for the one device of this process."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self.Event = functools.partial(Event, card)
        self.Stream = card.clock.new_stream

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
        self._card.clock.synchronize()
        self._card.flights.land()

    def current_stream(self, device: Any = None) -> Stream:
        return self._card.clock.stream

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """What is queued inside goes to `stream`."""
        clock = self._card.clock
        before, clock.stream = clock.stream, stream
        try:
            yield
        finally:
            clock.stream = before

    def memory_stats(self, device: Any = None) -> OrderedDict[str, int]:
        """The allocator's figures under the names that torch.accelerator.memory_stats has for them."""
        memory = self._card.memory
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
        return self._card.memory.used.current

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._card.memory.used.peak

    def memory_reserved(self, device: Any = None) -> int:
        return self._card.memory.reserved.current

    def max_memory_reserved(self, device: Any = None) -> int:
        return self._card.memory.reserved.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._card.memory.reset_peaks()

    def empty_cache(self) -> None:
        self._card.memory.empty_cache()

    def get_memory_info(self, device: Any = None) -> tuple[int, int]:
        """(free bytes, bytes in all). Example: 10 GiB with 1 GiB reserved: (9 GiB, 10 GiB)."""
        total = self._card.total_bytes or torch.iinfo(torch.int64).max
        return total - self._card.framework_bytes - self._card.memory.reserved.current, total

    @property
    def clock(self) -> Clock:
        """The device's clock."""
        return self._card.clock


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
)


def answer_for_accelerator(card: Card) -> None:
    """torch.accelerator's calls answer for this device; a backend in Python cannot answer them otherwise."""
    module = torch.get_device_module(NAME)
    for name in _ANSWERED:
        setattr(torch.accelerator, name, getattr(module, name))
    torch.accelerator.set_device_index = module.set_device
