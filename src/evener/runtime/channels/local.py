"""Several devices in one process: tensors are handed over, and moved where the receiver wants them.

On one device the receiver gets the sender's own memory: neither end may change it in place.
"""

import queue
import secrets
import threading
import time

import torch

from evener.runtime.channels.messages import Message
from evener.runtime.channels.places import Place
from evener.runtime.channels.problems import lost, stalled
from evener.runtime.channels.stop import Stop


class Hub:
    """The devices of this process; safe to use from a thread each. Channels opened anew need a new one."""

    def __init__(self) -> None:
        self.process = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._queues: dict[tuple[str, str], queue.SimpleQueue] = {}
        self._gone: set[str] = set()

    def queue(self, source: str, target: str) -> queue.SimpleQueue:
        """What is on its way from `source` to `target`; None in it says that `source` is gone."""
        with self._lock:
            if (source, target) not in self._queues:
                self._queues[source, target] = queue.SimpleQueue()
                if source in self._gone:
                    self._queues[source, target].put(None)
            return self._queues[source, target]

    def leave(self, device: str) -> None:
        """`device` closes: who waits for it now or later learns that."""
        with self._lock:
            self._gone.add(device)
            for (source, _), waiting in self._queues.items():
                if source == device:
                    waiting.put(None)

    def interrupt(self, device: str) -> None:
        """Wake `device` wherever it waits."""
        with self._lock:
            for (_, target), waiting in self._queues.items():
                if target == device:
                    waiting.put(None)

    def is_gone(self, device: str) -> bool:
        """Whether `device` had a channel and closed it."""
        with self._lock:
            return device in self._gone


class LocalTransport:
    """One device's end of its `hub`."""

    def __init__(self, here: str, hub: Hub, timeout_s: float, stop: Stop) -> None:
        self._here, self._hub, self._timeout_s, self._stop = here, hub, timeout_s, stop
        stop.also(lambda: hub.interrupt(here))

    def sender(self, to: Place) -> "LocalSender":
        return LocalSender(self._hub, self._here, to.device)

    def receiver(self, source: Place) -> "LocalReceiver":
        waiting = self._hub.queue(source.device, self._here)
        return LocalReceiver(waiting, source.device, self._timeout_s, self._stop)

    def close(self) -> None:
        self._hub.leave(self._here)

    def close_sockets(self) -> None:
        """There are none."""


class Sent:
    """What was sent is already out of the sender's hands."""

    def wait(self) -> None:
        return


SENT = Sent()


class LocalSender:
    """Hands over to one other device."""

    def __init__(self, hub: Hub, here: str, to: str) -> None:
        self._hub, self._to = hub, to
        self._queue = hub.queue(here, to)

    def send(self, tensors: tuple[torch.Tensor, ...], key: str) -> Sent:
        if self._hub.is_gone(self._to):
            raise lost(self._to, f"{key} was sent to it", "it closed its channel")
        self._queue.put((key, time.monotonic(), tuple((t.detach(), t.requires_grad) for t in tensors)))
        return SENT


class LocalReceiver:
    """Takes what one other device handed over."""

    def __init__(self, waiting: queue.SimpleQueue, source: str, timeout_s: float, stop: Stop) -> None:
        self._queue, self._source, self._timeout_s, self._stop = waiting, source, timeout_s, stop

    def take(self, key: str, device: torch.device) -> Message:
        try:
            item = self._queue.get(timeout=self._timeout_s)
        except queue.Empty:
            raise stalled(self._source, key, self._timeout_s) from None
        if item is None:
            self._queue.put(None)
            self._stop.check()
            raise lost(self._source, f"{key} was awaited from it", "it closed its channel")
        got, sent_s, parts = item
        tensors = tuple(t.to(device).requires_grad_(flag) for t, flag in parts)
        return Message(got, sent_s, tensors)
