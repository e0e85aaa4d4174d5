"""When a run saves checkpoints and which of them stay."""

from evener.core.figures import Value
from evener.errors import UsageError

_UNITS = {"min": 60.0, "s": 1.0, "h": 3600.0}


class Keep(Value, frozen=True, kw_only=True):
    """Which checkpoints of a run stay: the last `last`, and every `every`-th for good (0: none).

    Example: with last=2, every=3 the checkpoints 3, 5 and 6 of six stay.
    """

    last: int = 3
    every: int = 0

    def __post_init__(self) -> None:
        if self.last < 1 or self.every < 0:
            raise UsageError("at least the last checkpoint is kept", remedy="--keep-checkpoints 1 or more")


class Rule(Value, frozen=True, kw_only=True):
    """When to save, every `steps` steps or `seconds` seconds, and what to keep."""

    steps: int | None = None
    seconds: float | None = None
    keep: Keep = Keep()

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise UsageError("a checkpoint is due every so many steps or every so many seconds: one of them")
        if (self.steps is not None and self.steps < 1) or (
            self.seconds is not None and not 0 < self.seconds < float("inf")
        ):
            raise UsageError(
                f"a checkpoint every {self.steps or self.seconds or 0:g} cannot be kept up",
                remedy="steps from 1 on (200), or a time (10min)",
            )

    def is_due(self, number: int, elapsed_s: float) -> bool:
        """Whether to save before step `number`, `elapsed_s` seconds after the last time.

        Example: Rule(steps=20).is_due(40, 0.0).
        """
        if self.steps is not None:
            return number > 0 and number % self.steps == 0
        return self.seconds is not None and elapsed_s >= self.seconds


def rule_of(every: str | int, keep: Keep | None = None) -> Rule:
    """The rule that a person spells: 200 (steps), "90s", "10min" or "2h". UsageError for anything else."""
    text = str(every).strip().lower()
    unit = next((u for u in _UNITS if text.endswith(u)), "")
    try:
        if unit:
            return Rule(seconds=float(text.removesuffix(unit)) * _UNITS[unit], keep=keep or Keep())
        return Rule(steps=int(text), keep=keep or Keep())
    except ValueError:
        raise UsageError(
            f"a checkpoint every {every!r} cannot be read", remedy="steps (200) or a time (90s, 10min, 2h)"
        ) from None
