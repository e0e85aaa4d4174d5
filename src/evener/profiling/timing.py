"""Timing through the driver's seam, and the time there is for it."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from evener.core.figures import Figure, quartiles
from evener.core.seams import Driver

STEADY = 1e-3
"""Three samples in a row that agree to this part need no fourth: paced devices repeat themselves exactly."""


class Stopwatch:
    """Runs work as actions of a driver and tells how long they took on the driver's clock."""

    def __init__(self, driver: Driver, budget_s: float) -> None:
        self._driver = driver
        self._end_s = driver.now() + budget_s

    def timed(self, action: str, work: Callable[[], Any], signature: Hashable = ()) -> tuple[Any, float]:
        """(result, seconds) of `work` as `action`."""
        before = self._driver.now()
        result = self._driver.run(action, work, signature=signature)
        return result, self._driver.now() - before

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left; negative when it is overdrawn."""
        return self._end_s - self._driver.now()


def figure_of(seconds: Sequence[float]) -> Figure | None:
    """The median, with half the distance between the quartiles as relative spread; None when it is 0.

    Example: 9, 10, 12 ms give 10 ms with a spread of 0.075.
    """
    lower, middle, upper = quartiles(seconds) if seconds else (0.0, 0.0, 0.0)
    if middle <= 0:
        return None
    return Figure(value=middle, source="measured", spread=(upper - lower) / 2 / middle)


def is_steady(seconds: Sequence[float]) -> bool:
    """Whether the last three samples agree so well that more would tell nothing new."""
    last = seconds[-3:]
    return len(last) == 3 and max(last) - min(last) <= STEADY * max(last)
