"""What a planner hands back: a plan, how good it is known to be, and why."""

from typing import Literal

from evener.core.figures import Value
from evener.core.plan import LeftOut, Plan

Status = Literal["proven", "within", "time limit", "given"]


class Alternative(Value, frozen=True, kw_only=True):
    """Another way to run the job, and its predicted seconds a step; absent seconds mean that it does not
    fit. `global_batch` is given where it is not the job's; `note` says why it is none after all.
    """

    name: str
    step_s: float | None = None
    global_batch: int | None = None
    samples: dict[str, int] = {}
    note: str = ""


class PlanResult(Value, frozen=True, kw_only=True):
    """`plan` is the best one found. No plan of the shapes searched is faster than plan × (1 - gap).

    "proven": gap is 0 up to rounding. "within": gap is the proven bound. "time limit": the search was cut
    short, gap is what the bound had reached. "given": the split was given, and no other was looked at.
    """

    plan: Plan
    status: Status
    gap: float = 0.0
    limiter: str = ""
    reasons: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()

    @property
    def bound_s(self) -> float:
        """Seconds a step that no plan of the shapes searched can beat."""
        assert self.plan.prediction is not None
        return self.plan.prediction.step_s * (1 - self.gap)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        return self.plan.left_out
