"""How long a job was without a step when its devices changed, part by part.

noticed ──roll call──► standings ──plan──► turn ──forming──► group and state ──first step──► committed
"""

import time
from collections.abc import Callable

from evener.core.figures import Value


class Passage(Value, frozen=True, kw_only=True):
    """From noticing that a generation had ended to the first committed step of `generation`, in seconds.

    `noticed_at_s` is Unix time, `step` the one that was taken first.
    """

    generation: int
    step: int
    noticed_at_s: float
    parts_s: dict[str, float]

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {1000 * s:.0f}" for name, s in self.parts_s.items())
        whole_s = sum(self.parts_s.values())
        return (
            f"generation {self.generation} had its first step {1000 * whole_s:.0f} ms after the change was "
            f"noticed: {parts} ms (measured)"
        )


class Stopwatch:
    """Marks the parts of one passage after another."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._now = clock, now
        self._parts: dict[str, float] = {}
        self._noticed_at_s = self._since_s = 0.0

    def start(self) -> None:
        """The end of a generation was noticed."""
        self._parts, self._noticed_at_s, self._since_s = {}, self._now(), self._clock()

    def mark(self, part: str) -> None:
        """`part` is done; nothing where no passage is on its way."""
        if self._noticed_at_s:
            now = self._clock()
            self._parts[part] = self._parts.get(part, 0.0) + now - self._since_s
            self._since_s = now

    def finish(self, generation: int, step: int) -> Passage | None:
        """The passage that has just ended, None without one."""
        if not self._noticed_at_s:
            return None
        found = Passage(
            generation=generation, step=step, noticed_at_s=self._noticed_at_s, parts_s=dict(self._parts)
        )
        self._noticed_at_s = 0.0
        return found
