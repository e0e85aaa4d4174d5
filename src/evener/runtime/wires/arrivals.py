"""How fast messages of each other device come in: what a link carries while sums go over it."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import islice

WINDOW_BYTES = 2.0**20


class Arrivals:
    """Times and bytes of one step's messages, by source; noted by several threads."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._came: dict[str, list[tuple[float, int]]] = defaultdict(list)

    def note(self, source: str, num_bytes: int) -> None:
        """A message of `source` has come."""
        with self._lock:
            self._came[source].append((self._clock(), num_bytes))

    def take(self) -> dict[str, float]:
        """Bytes/s of each source at its best since the last call, over about a megabyte in a row.

        The best, because a source that computes or waits sends nothing meanwhile; what its link carries shows
        while it sends. None of fewer than three messages or less than two megabytes. Example: messages of
        1 MB that come 80 ms apart: 12.5 MB/s.
        """
        with self._lock:
            came, self._came = self._came, defaultdict(list)
        found = {}
        for source, messages in came.items():
            messages.sort()
            if len(messages) > 2 and sum(n for _, n in messages) >= 2 * WINDOW_BYTES:
                found[source] = max(_rates(messages), default=0.0)
        return {source: rate for source, rate in found.items() if rate > 0}


def _rates(messages: list[tuple[float, int]]) -> list[float]:
    """Bytes/s from one message on, until a window is full."""
    rates = []
    for first in range(len(messages) - 1):
        held = 0
        for end, num_bytes in islice(messages, first + 1, None):
            held += num_bytes
            if held >= WINDOW_BYTES:
                rates.append(held / max(end - messages[first][0], 1e-9))
                break
    return rates
