"""What happened when: one type for predicted and measured runs."""

from typing import Literal

from evener.core.figures import Value

Cause = Literal[
    "compute",  # forward and backward
    "wait",  # for a slower peer
    "transfer",  # data on its way that nothing hid
    "bubble",  # idle by the shape of the schedule
    "reduce",  # exposed part of the gradient reduction
    "optimizer",  # update, clip, agreement on the step
    "input",  # waiting for data
    "overhead",  # everything else, so that the causes add up to the step
]
CAUSES: tuple[Cause, ...] = Cause.__args__  # type: ignore[attr-defined]


class Span(Value, frozen=True, kw_only=True):
    """One device busy with one action from `start_s` to `end_s` (seconds since the run's start)."""

    device: str
    action: str
    start_s: float
    end_s: float
    cause: Cause
    step: int = 0


class Trace(Value, frozen=True, kw_only=True):
    """Spans of a run, predicted or measured."""

    source: Literal["predicted", "measured"]
    spans: tuple[Span, ...]
    steps: int = 0
    note: str = ""

    def seconds_by_cause(self, device: str) -> dict[str, float]:
        """Seconds of `device` by cause over the whole trace."""
        seconds: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        for span in self.spans:
            if span.device == device:
                seconds[span.cause] += span.end_s - span.start_s
        return seconds
