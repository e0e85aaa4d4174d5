"""A device's own time. The host queues work and runs ahead; it sleeps only where it would wait.

    host      queue queue queue ········ synchronize ·········▷|
    compute         ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓|   one operation after another
    copy in    ▒▒▒▒▒▒▒▒            ▒▒▒▒▒▒▒▒                         beside it, if on a stream of its own

Work starts when its stream and its engine are free and the host has queued it. What this machine needs to
compute the values takes no time on the device's clock; what it needs beyond that makes the device *lag*.
"""

import threading
import time
from collections.abc import Callable
from typing import Literal

from evener.rehearsal.waiting import wait_until

Engine = Literal["compute", "in", "out"]


class Stream:
    """Work that is done in order; streams of a device run beside each other.

    Has what torch.Stream has: a context in which work goes to it, and ways to wait for it.
    """

    def __init__(self, clock: "Clock", name: str) -> None:
        self._clock, self.name = clock, name
        self._before: list[Stream] = []
        self.free_s = 0.0

    def wait_stream(self, other: "Stream") -> None:
        """What is queued here from now on waits for what is queued on `other` now."""
        self.free_s = max(self.free_s, other.free_s)

    def query(self) -> bool:
        """Whether the host knows that all is done."""
        return self.free_s <= self._clock.waited_s

    def synchronize(self) -> None:
        """The host waits for all that is queued here."""
        self._clock.wait(self.free_s)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """An event that happens when all that is queued here now is done."""
        event = event or Event(self._clock)
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        """What is queued here from now on waits for `event`."""
        event.wait(self)

    def __enter__(self) -> "Stream":
        self._before.append(self._clock.stream)
        self._clock.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        self._clock.stream = self._before.pop()


class Event:
    """A moment on the device's clock: recorded into a stream, waited for by the host or another stream."""

    def __init__(self, clock: "Clock", *, enable_timing: bool = False) -> None:
        self._clock, self._timing = clock, enable_timing
        self._at_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """The event happens when all that is queued on the stream (the current one) is done."""
        self._at_s = max(self._clock.host_s, (stream or self._clock.stream).free_s)

    def query(self) -> bool:
        """Whether the host knows that it happened."""
        return self._at_s is None or self._at_s <= self._clock.waited_s

    def synchronize(self) -> None:
        """The host waits for it."""
        if self._at_s is not None:
            self._clock.wait(self._at_s)

    def wait(self, stream: Stream | None = None) -> None:
        """What is queued on the stream (the current one) from now on waits for it."""
        stream = stream or self._clock.stream
        if self._at_s is not None:
            stream.free_s = max(stream.free_s, self._at_s)

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to `end`; both must have happened."""
        if not (self._timing and end._timing) or self._at_s is None or end._at_s is None:
            raise RuntimeError("both events must be recorded, and made with enable_timing=True")
        if not (self.query() and end.query()):
            raise RuntimeError("both events must have happened before the time between them is known")
        return (end._at_s - self._at_s) * 1e3


class _Host(threading.local):
    """One thread of the host: its own time, and the stream its work goes to."""

    host_s: float
    seen_s: float
    stream: Stream | None = None

    def __init__(self, started_s: Callable[[], float], clock: Callable[[], float]) -> None:
        self.host_s, self.seen_s = started_s(), clock()


class Clock:
    """Seconds of one device since it was opened, with the host's in front.

    With `host_counts`, what the host does between two operations takes the time it really takes, as on a
    real machine; without it takes none, so that a busy machine changes nothing, and the caller says with
    `spend` what does count. `arrived` is called after each wait.
    """

    def __init__(
        self,
        *,
        host_counts: bool = True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self.host_counts = host_counts
        self.origin_s = clock()
        self.waited_s = self.lag_s = 0.0
        self.arrived: Callable[[], None] = lambda: None
        self._free_s: dict[str, float] = {"compute": 0.0, "in": 0.0, "out": 0.0}
        self._streams: list[Stream] = [Stream(self, "default stream")]
        self._host = _Host(lambda: self.waited_s, clock)

    @property
    def host_s(self) -> float:
        """Where the calling thread of the host is."""
        return self._host.host_s

    @property
    def stream(self) -> Stream:
        """The stream that the calling thread's work goes to."""
        return self._host.stream or self._streams[0]

    @stream.setter
    def stream(self, stream: Stream) -> None:
        self._host.stream = stream

    def enter(self) -> None:
        """The host calls the device: its own time until here counts, if it does."""
        if self.host_counts:
            host = self._host
            host.host_s += self._clock() - host.seen_s

    def leave(self) -> None:
        """Back in the host's own code."""
        if self.host_counts:
            self._host.seen_s = self._clock()

    def queue(self, seconds: float, engine: Engine = "compute") -> float:
        """Add work of `seconds` to the current stream; when it will end, on the device's clock.

        Example: two operations of 2 s queued at 0 end at 2 and 4, and the host is still at 0.
        """
        host = self._host
        stream = host.stream or self._streams[0]
        end_s = max(host.host_s, stream.free_s, self._free_s[engine]) + seconds
        stream.free_s = self._free_s[engine] = end_s
        return end_s

    def next_name(self) -> str:
        """A name for one more stream."""
        return f"stream {len(self._streams)}"

    def add(self, stream: Stream) -> None:
        """Waiting for all that is queued now waits for `stream` as well."""
        self._streams.append(stream)

    def spend(self, seconds: float) -> None:
        """The host is busy for `seconds` with something that counts."""
        self._host.host_s += seconds

    def end_s(self) -> float:
        """When all that is queued will be done."""
        return max(self.host_s, *(s.free_s for s in self._streams))

    def wait(self, until_s: float) -> None:
        """The host waits until `until_s` on the device's clock, and this machine really does."""
        host = self._host
        host.host_s = max(host.host_s, until_s)
        left_s = wait_until(self.origin_s + host.host_s, self._clock, self._sleep)
        self.lag_s = max(0.0, -left_s)
        self.waited_s = max(self.waited_s, until_s)
        host.seen_s = self._clock()
        self.arrived()

    def synchronize(self) -> None:
        """The host waits for all that is queued."""
        self.wait(self.end_s())
