"""Copies between a device and pinned memory of its host, beside the computing.

compute   ▓▓▓▓ layer 0 ▓▓▓▓│▓▓▓▓ layer 1 ▓▓▓▓│··│▓▓ layer 2 ▓▓▓▓      ·· computing waits for a copy
in             ▒▒▒ layer 1 │▒▒▒▒▒▒ layer 2 ▒▒▒▒▒│
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Copied:
    """A tensor on its way: `tensor` may be used where `done` was waited for (None: it is there)."""

    tensor: torch.Tensor
    done: torch.Event | None


class Flow:
    """What goes to `device` and what comes back, each on a stream of its own; on a CPU plain copies.

    `exposed_s()` is for how long the device's computing has waited for copies since it was last asked.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._apart = device.type != "cpu"
        self._in = torch.Stream(device) if self._apart else None
        self._out = torch.Stream(device) if self._apart else None
        self._waits: list[tuple[torch.Event, torch.Event]] = []

    def host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host that copies need not stage."""
        return torch.empty(numel, dtype=dtype, pin_memory=self._apart)

    def bring(self, source: torch.Tensor, into: torch.Tensor | None = None) -> Copied:
        """Start copying `source` to the device, after what is queued there now has been done.

        Memory that the device lets go of before may then be taken, and what is queued afterwards runs beside.
        """
        target = torch.empty_like(source, device=self.device) if into is None else into
        if self._in is None:
            return Copied(target.copy_(source), None)
        self._in.wait_stream(torch.accelerator.current_stream(self.device))
        with self._in:
            target.copy_(source, non_blocking=True)
        return Copied(target, self._in.record_event())

    def send(self, source: torch.Tensor) -> Copied:
        """Start copying `source`, which must be kept until `landed`, to the host."""
        if self._out is None:
            return Copied(source, None)
        self._out.wait_stream(torch.accelerator.current_stream(self.device))
        with self._out:
            host = source.to("cpu", non_blocking=True)
        return Copied(host, self._out.record_event())

    def await_(self, copied: Copied) -> None:
        """What is queued on the device from now on waits for `copied`."""
        if copied.done is None:
            return
        now = torch.accelerator.current_stream(self.device)
        before, after = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        before.record(now)
        now.wait_event(copied.done)
        after.record(now)
        self._waits.append((before, after))

    def landed(self, copied: Copied) -> torch.Tensor:
        """The tensor on the host, once it is there."""
        if copied.done is not None:
            copied.done.synchronize()
        return copied.tensor

    def exposed_s(self) -> float:
        """Seconds that computing waited since this was last asked; the host waits for the last one's end."""
        waits, self._waits = self._waits, []
        if waits:
            waits[-1][1].synchronize()  # an action that ran out of memory has waited for nothing
        return sum(before.elapsed_time(after) for before, after in waits) / 1e3
