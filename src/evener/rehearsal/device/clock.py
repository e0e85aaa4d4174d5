"""A device's own time. The host queues work and runs ahead; it sleeps only where it would wait.

    host      queue queue queue ········ synchronize ·········▷|
    compute         ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓|   one operation after another
    copy in    ▒▒▒▒▒▒▒▒            ▒▒▒▒▒▒▒▒                         beside it, if on a stream of its own

Work starts when its stream and its engine are free and the host has queued it. What this machine needs to
compute the values takes no time on the device's clock; what it needs beyond that makes the device *lag*.
"""

import time
from collections.abc import Callable
from itertools import count
from typing import Literal

SPIN_S = 250e-6  # sleep overshoots by 50 to 150 µs; spinning for the last bit hits the moment within 3 µs
Engine = Literal["compute", "in", "out"]

_names = count(1)


class Stream:
    """Work that is done in order; streams of a device run beside each other."""

    def __init__(self, name: str = "") -> None:
        self.name = name or f"stream {next(_names)}"
        self.free_s = 0.0


class Clock:
    """Seconds of one device since it was opened, with the host's in front.

    With `host_counts`, what the host does between two operations takes the time it really takes, as on a
    real machine; without it takes none, so that a busy machine changes nothing, and the caller says with
    `spend` what does count.
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
        self.host_s = 0.0
        self.waited_s = 0.0
        self.lag_s = 0.0
        self.stream = self.default = Stream("default stream")
        self.busy_s: dict[str, float] = {"compute": 0.0, "in": 0.0, "out": 0.0}
        self._free_s: dict[str, float] = {"compute": 0.0, "in": 0.0, "out": 0.0}
        self._streams: list[Stream] = [self.default]
        self.origin_s = self._seen_s = clock()

    def enter(self) -> float:
        """The host calls the device: its own time until here counts, if it does. This machine's clock."""
        now_s = self._clock()
        if self.host_counts:
            self.host_s += now_s - self._seen_s
        return now_s

    def leave(self) -> None:
        """Back in the host's own code."""
        self._seen_s = self._clock()

    def queue(self, seconds: float, engine: Engine = "compute") -> float:
        """Add work of `seconds` to the current stream; when it will end, on the device's clock.

        Example: two operations of 2 s queued at 0 end at 2 and 4, and the host is still at 0.
        """
        stream = self.stream
        start_s = max(self.host_s, stream.free_s, self._free_s[engine])
        end_s = start_s + seconds
        stream.free_s = self._free_s[engine] = end_s
        self.busy_s[engine] += seconds
        return end_s

    def new_stream(self) -> Stream:
        """A stream beside the others."""
        stream = Stream()
        self._streams.append(stream)
        return stream

    def spend(self, seconds: float) -> None:
        """The host is busy for `seconds` with something that counts."""
        self.host_s += seconds

    def end_s(self) -> float:
        """When all that is queued will be done."""
        return max(self.host_s, *(s.free_s for s in self._streams))

    def wait(self, until_s: float) -> None:
        """The host waits until `until_s` on the device's clock, and this machine really does."""
        self.waited_s = max(self.waited_s, until_s)
        self.host_s = max(self.host_s, until_s)
        deadline_s = self.origin_s + self.host_s
        left_s = deadline_s - self._clock()
        if left_s > 0:
            if left_s > SPIN_S:
                self._sleep(left_s - SPIN_S)
            while self._clock() < deadline_s:
                pass
            self.lag_s = 0.0
        else:
            self.lag_s = -left_s
        self._seen_s = self._clock()

    def synchronize(self) -> None:
        """The host waits for all that is queued."""
        self.wait(self.end_s())
