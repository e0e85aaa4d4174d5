"""Copies of a device's state, made beside the training: forwards and backwards only read parameters.

    main thread    … step 7 │ begin ─ forwards, backwards of step 8 ─ wait for the copies ─ optimiser moves
    writer thread           └─ copy parameters and optimiser state ─┘  hash, write, sync ────────────────►

So the optimiser waits for what is left of a copy, mostly nothing, and never for the disk. What forwards move
(BatchNorm's statistics) is copied at once. The copies' memory is kept for the next time: as much as the
device writes, on the host.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from evener.runtime.checkpoints.shards import bytes_of


class Staging:
    """Holds the copies of one device. `wait_s` sums the seconds that the optimiser waited for them."""

    def __init__(self, optimizer: torch.optim.Optimizer, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._copies: dict[str, Tensor] = {}
        self._done = threading.Event()
        self._done.set()
        self._hook = optimizer.register_step_pre_hook(lambda *_: self.settle())
        self.wait_s = 0.0

    def begin(self, state: Mapping[str, Tensor], at_once: Collection[str]) -> Callable[[], dict[str, Tensor]]:
        """Start a copy of `state`; `at_once` names what is copied before this returns.

        The result is for another thread to call, which must: it makes the rest of the copies and gives them
        all. Until then `settle` waits.
        """
        self.settle()
        copies = {name: self._room_for(name, tensor) for name, tensor in state.items()}
        for name in at_once:
            copies[name].copy_(state[name])
        later = [name for name in state if name not in at_once]
        streams = _Streams([state[name] for name in later])
        self._done.clear()

        def copy() -> dict[str, Tensor]:
            try:
                streams.copy([(copies[name], state[name]) for name in later])
                return copies
            finally:
                self._done.set()

        return copy

    def settle(self) -> None:
        """Return when nothing is being copied: parameters and optimiser state may move."""
        if not self._done.is_set():
            start = self._clock()
            self._done.wait()
            self.wait_s += self._clock() - start

    def close(self) -> None:
        """Let go of the optimiser and of the copies."""
        self.settle()
        self._hook.remove()
        self._copies.clear()

    def _room_for(self, name: str, tensor: Tensor) -> Tensor:
        room = self._copies.get(name)
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            pin = tensor.device.type != "cpu"
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
            self._copies[name] = room
        return room


class _Streams:
    """Copies on a stream of their own, behind what the device was asked to do when this was made."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        for device in {t.device for t in tensors if t.device.type != "cpu"}:
            stream = torch.Stream(device)
            stream.wait_stream(torch.accelerator.current_stream(device))
            self._streams[device] = stream

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        with torch.no_grad():
            for target, source in pairs:
                if source.device in self._streams:
                    with self._streams[source.device]:
                        target.copy_(source, non_blocking=True)
                elif source.is_contiguous():
                    # numpy copies on this thread alone; torch would start a team beside the training's
                    np.copyto(bytes_of(target), bytes_of(source))
                else:
                    target.copy_(source)
        for stream in self._streams.values():
            stream.synchronize()
