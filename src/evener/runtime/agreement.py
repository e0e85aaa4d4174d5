"""Whether a step counts: decided by every device from the same tally, so all decide alike."""

from dataclasses import dataclass
from typing import Literal

from evener.runtime.tally import ABANDONED, HEALTHY, NON_FINITE, OUT_OF_MEMORY

_WORDS = {
    NON_FINITE: ("has a loss that is NaN or infinite", "have losses that are NaN or infinite"),
    OUT_OF_MEMORY: ("ran out of memory",) * 2,
    ABANDONED: ("did not finish its backward pass", "did not finish their backward passes"),
}


@dataclass(frozen=True)
class Verdict:
    """What all devices do with the gradients of a step, and the sentence why."""

    do: Literal["apply", "skip", "shrink", "stop"]
    reason: str
    devices: tuple[str, ...] = ()


def judge(
    health: dict[str, int],
    *,
    on_non_finite: Literal["stop", "skip"],
    weight: float = 1.0,
) -> Verdict:
    """The verdict on a step from every device's health.

    Out of memory makes the devices concerned take smaller micro-batches and all redo the step; a step
    abandoned by user code is skipped by all; NaN stops the job or skips the step as the user chose.
    A step without any weight has no mean and is skipped.
    Example: judge({"a/0": 0, "a/1": 2}, on_non_finite="stop").do == "shrink".
    """
    by_code: dict[int, tuple[str, ...]] = {}
    for device, code in health.items():
        by_code[code] = (*by_code.get(code, ()), device)
    for code, do in ((OUT_OF_MEMORY, "shrink"), (ABANDONED, "skip"), (NON_FINITE, on_non_finite)):
        if code in by_code:
            names = by_code[code]
            words = _WORDS[code][len(names) > 1]
            return Verdict(do, f"{', '.join(names)} {words}", names)  # type: ignore[arg-type]
    assert set(by_code) == {HEALTHY}, by_code
    if weight == 0:
        return Verdict("skip", "nothing in the global batch counts: its weight is 0")
    return Verdict("apply", "all devices are healthy")
