"""Scripted trouble: one text that drives the simulator and the real run.

    slow lab1/gpu0 x3 at step 40; leave lab2/gpu1 at 80; join lab3/gpu0 at 120;
    cut lab1|lab2 at 150 for 5s; oom lab1/gpu1 at 160

"at 40" is when step 40 begins (steps count from 0), "at 40.5" when half of it is done. slow and cut take
"for 5s"; without it a slow device stays slow, and a cut must say how long it lasts.
"""

import re
from typing import Literal

from evener.core.figures import Value
from evener.errors import UsageError

FaultType = Literal["slow", "leave", "join", "cut", "oom"]
_EVENT = re.compile(
    r"^(?P<type>slow|leave|join|cut|oom)\s+(?P<what>\S+?)(?:\s+x(?P<factor>[\d.]+))?"
    r"\s+at(?:\s+step)?\s+(?P<at>\d+(?:\.\d+)?)(?:\s+for\s+(?P<for>[\d.]+)\s*s)?$"
)
EXAMPLE = "slow lab1/gpu0 x3 at step 40; leave lab2/gpu1 at 80; cut lab1|lab2 at 150 for 5s"


class Fault(Value, frozen=True, kw_only=True):
    """One event: `device` (for a cut: one end, and `other` the other; hosts or devices) at step `at_step`.

    `factor` is how many times slower; `for_s` how long a slow spell or a cut lasts.
    """

    type: FaultType
    device: str
    at_step: float
    other: str | None = None
    factor: float | None = None
    for_s: float | None = None

    def __post_init__(self) -> None:
        if (self.factor is not None) != (self.type == "slow"):
            raise ValueError("slow needs a factor (x3), and nothing else takes one")
        if self.factor is not None and not 0 < self.factor < float("inf"):
            raise ValueError(f"a factor must be positive, got x{self.factor:g}")
        if (self.other is not None) != (self.type == "cut"):
            raise ValueError("cut names two ends, a|b, and nothing else does")
        if self.type == "cut" and self.for_s is None:
            raise ValueError("cut needs its length: for 5s")
        if self.for_s is not None and (self.type not in ("slow", "cut") or not self.for_s > 0):
            raise ValueError("only slow and cut last for some seconds, more than 0")
        if self.at_step < 0:
            raise ValueError(f"steps count from 0, got {self.at_step:g}")

    def __str__(self) -> str:
        what = f"{self.device}|{self.other}" if self.other else self.device
        factor = "" if self.factor is None else f" x{self.factor:.12g}"
        length = "" if self.for_s is None else f" for {self.for_s:.12g}s"
        return f"{self.type} {what}{factor} at {self.at_step:.12g}{length}"


class FaultScript(Value, frozen=True, kw_only=True):
    """Events in the order in which they happen."""

    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        return "; ".join(map(str, self.faults))


def parse_faults(text: str) -> FaultScript:
    """The script spelt `text`, sorted by step; UsageError quotes the event that is wrong.

    parse_faults(str(script)) == script for a script in order.
    """
    faults = []
    for event in filter(None, (part.strip() for part in text.replace("\n", ";").split(";"))):
        match = _EVENT.match(event)
        if not match:
            raise UsageError(f"cannot read the fault {event!r}", remedy=EXAMPLE)
        device, bar, other = match["what"].partition("|")
        try:
            faults.append(
                Fault(
                    type=match["type"],  # type: ignore[arg-type]
                    device=device,
                    other=other if bar else None,
                    at_step=float(match["at"]),
                    factor=float(match["factor"]) if match["factor"] else None,
                    for_s=float(match["for"]) if match["for"] else None,
                )
            )
        except ValueError as e:
            raise UsageError(f"the fault {event!r} is wrong: {e}", remedy=EXAMPLE) from e
    return FaultScript(faults=tuple(sorted(faults, key=lambda f: f.at_step)))
