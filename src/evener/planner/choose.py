"""The planner's front door."""

from typing import Literal

from msgspec.structs import replace

from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.core.profile import Profile
from evener.errors import NoPlanFitsError
from evener.planner.data_parallel import plan_data_parallel
from evener.planner.result import PlanResult

Shapes = Literal["data-parallel", "all"]


def plan(fleet: Fleet, profile: Profile, job: Job, *, shapes: Shapes = "data-parallel") -> PlanResult:
    """The best plan for `job` on `fleet`, how good it is known to be, and why.

    `shapes` limits the search to what a runtime can run; a split given by the job is data-parallel by itself.
    Raises NoPlanFitsError naming the limits that clash, UnknownNameError for a kind, device or layer the
    files do not hold, UsageError for wishes that contradict each other.
    """
    if shapes == "data-parallel" or job.batch_per_device is not None or job.keep_all:
        return plan_data_parallel(fleet, profile, job)
    if not profile.timings:
        flat = plan_data_parallel(fleet, profile, job)
        said = "only data parallelism was considered: the profile has no seconds by layer"
        return replace(flat, reasons=(*flat.reasons, said)) if len(fleet.devices) > 1 else flat
    flat_result: PlanResult | None
    try:
        flat_result = plan_data_parallel(fleet, profile, job)
    except NoPlanFitsError:
        flat_result = None
    from evener.planner.whole import plan_whole  # only when wanted: data parallelism answers without it

    return plan_whole(fleet, profile, job, flat_result)
