"""Choose: fleet + profile + job → the best plan, how good it is known to be, and why."""

from evener.planner.choose import plan
from evener.planner.result import Alternative, PlanResult

__all__ = ["Alternative", "PlanResult", "plan"]
