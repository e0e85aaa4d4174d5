"""The planner's front door."""

from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.core.profile import Profile
from evener.planner.data_parallel import plan_data_parallel
from evener.planner.result import PlanResult


def plan(fleet: Fleet, profile: Profile, job: Job) -> PlanResult:
    """The best plan for `job` on `fleet`, how good it is known to be, and why.

    Raises NoPlanFitsError naming the limits that clash, UnknownNameError for a kind, device or layer the
    files do not hold, UsageError for wishes that contradict each other.
    """
    return plan_data_parallel(fleet, profile, job)
