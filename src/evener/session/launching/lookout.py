"""Nothing is silent: says which device's process is stopped, and who is idle when no step ends for long."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

QUIET_S = 30.0  # without a finished step before something is said; then again after twice as long


class Lookout:
    """Looks at the processes of a job from outside.

    `metrics` is the file that grows with every step. `clock` and `process_of` stand for time and psutil.
    """

    def __init__(
        self,
        metrics: Path,
        clock: Callable[[], float] = time.monotonic,
        process_of: Callable[[int], Any] = psutil.Process,
    ) -> None:
        self._metrics, self._clock, self._process_of = metrics, clock, process_of
        self._size, self._since_s, self._patience_s = 0, clock(), QUIET_S
        self._stopped: set[str] = set()
        self._busy_s: dict[str, float] = {}

    def look(self, processes: Sequence[Any]) -> list[str]:
        """Sentences on what is wrong now and was not said before; `processes` have a name and a pid."""
        found = []
        busy = {}
        for process in processes:
            try:
                seen = self._process_of(process.pid)
                stopped = seen.status() == psutil.STATUS_STOPPED
                times = seen.cpu_times()
            except psutil.Error:
                continue  # it has just ended; the one who waits for it will say how
            busy[process.name] = times.user + times.system
            if stopped and process.name not in self._stopped:
                found.append(
                    f"the process of {process.name} is stopped; it goes on with kill -CONT {process.pid}"
                )
            (self._stopped.add if stopped else self._stopped.discard)(process.name)
        return found + self._silence(busy)

    def _silence(self, busy: dict[str, float]) -> list[str]:
        size = self._metrics.stat().st_size if self._metrics.exists() else 0
        now = self._clock()
        if size != self._size or not self._busy_s:
            self._size, self._since_s, self._patience_s, self._busy_s = size, now, QUIET_S, busy
            return []
        quiet_s = now - self._since_s
        if quiet_s < self._patience_s:
            return []
        self._patience_s *= 2
        parts = ", ".join(
            f"{name} {(s - self._busy_s.get(name, 0.0)) / quiet_s:.0%}" for name, s in busy.items()
        )
        return [f"no step has ended for {quiet_s:.0f} s; busy on a processor since then: {parts}"]
