"""The planner's front door."""

from msgspec.structs import replace

from evener.core.fleet import Fleet
from evener.core.job import Job, Shapes
from evener.core.ownership import WORDS
from evener.core.plan import HELD
from evener.core.profile import Profile
from evener.cost.evaluate import CostModel
from evener.cost.loading import load_bytes
from evener.cost.worth import unbounded_samples_per_s, useful_samples
from evener.errors import NoPlanFitsError, UsageError
from evener.planner.data_parallel import plan_data_parallel
from evener.planner.fewer import with_fewer
from evener.planner.links import UNLINKED, check_links
from evener.planner.result import PlanResult
from evener.planner.sources import marked
from evener.planner.unused import with_unused


def plan(fleet: Fleet, profile: Profile, job: Job, *, shapes: Shapes = "data-parallel") -> PlanResult:
    """The best plan for `job` on `fleet`, how good it is known to be, and why.

    `shapes`: "data-parallel" plans one stage a device; "all" searches pipelines, shared stages and their
    mixtures too; "auto" does that only where no device can hold the whole model. A split given by the job
    is data-parallel.
    What was assumed or taken from a table is named in the reasons. Raises NoPlanFitsError naming the limits
    that clash, UnknownNameError for a kind, device, layer or link the files do not hold, UsageError for
    wishes that contradict each other.
    """
    result = _found(fleet, profile, job, shapes)
    if job.batch_per_device is not None:
        result = replace(result, status="given", gap=0.0)
    if job.fewer:
        result = with_fewer(fleet, profile, job, result)
    result = with_unused(fleet, job, result)
    if UNLINKED not in job.allow:
        check_links(fleet, result.plan)
    return marked(fleet, profile, _with_loading(fleet, profile, result))


def _with_loading(fleet: Fleet, profile: Profile, result: PlanResult) -> PlanResult:
    """With what each device holds at most while state is put into it."""
    prediction = result.plan.prediction
    if prediction is None:
        return result
    loading = load_bytes(CostModel(fleet=fleet, profile=profile), result.plan)
    return replace(result, plan=replace(result.plan, prediction=replace(prediction, load_bytes=loading)))


def _found(fleet: Fleet, profile: Profile, job: Job, shapes: Shapes) -> PlanResult:
    given = job.batch_per_device is not None or job.keep_all
    if job.place:
        return _placed(fleet, profile, job, given)
    parts = None
    if profile.timings and job.state != "replicated":
        from evener.planner.unequal import plan_unequal  # like all shapes, only when wanted

        parts = plan_unequal(fleet, profile, job)
    if job.state in HELD:
        parts = _better_in_stages(parts, fleet, profile, job, shapes, given)
        return _in_parts(parts, fleet, profile, job)
    flat: PlanResult | None = None
    failure: NoPlanFitsError | None = None
    try:
        flat = plan_data_parallel(fleet, profile, job)
    except NoPlanFitsError as e:
        failure = e
    narrow = (
        shapes == "data-parallel" or given or not profile.timings or (shapes == "auto" and flat is not None)
    )
    if narrow and len(fleet.devices) > 1 and shapes != "data-parallel" and not given:
        flat, parts = (r and replace(r, reasons=(*r.reasons, _narrow(profile))) for r in (flat, parts))
    if not narrow:
        from evener.planner.whole import plan_whole  # only when wanted: data parallelism answers without it

        try:
            flat = _with_worth(fleet, profile, plan_whole(fleet, profile, job, flat))
        except NoPlanFitsError as e:
            failure = e
        parts = _better_in_stages(parts, fleet, profile, job, shapes, given)
    if parts is None and flat is not None:
        return flat
    from evener.planner.unequal import better, with_hint

    best = better(flat, parts, fleet, job)
    if best is None:
        assert failure is not None
        raise with_hint(failure, fleet, profile, job, stages=not narrow) if profile.timings else failure
    return best


def _better_in_stages(
    parts: PlanResult | None, fleet: Fleet, profile: Profile, job: Job, shapes: Shapes, given: bool
) -> PlanResult | None:
    """`parts`, or a plan that cuts the model and keeps state in parts, where that is wanted and better."""
    from evener.planner.unequal import better, is_short, levels_in_stages

    if job.state == "replicated" or given or not profile.timings or shapes == "data-parallel":
        return parts
    if (shapes == "auto" and parts is not None) or not (levels := levels_in_stages(job)):
        return parts
    if job.state == "auto" and not is_short(fleet, profile, job):
        return parts
    from evener.planner.owned_stages import plan_stages

    found = plan_stages(fleet, profile, job, levels)
    return better(parts, found and _with_worth(fleet, profile, found), fleet, job)


def _in_parts(parts: PlanResult | None, fleet: Fleet, profile: Profile, job: Job) -> PlanResult:
    """The plan that keeps in parts what was asked for."""
    from evener.planner.unequal import with_hint

    if not profile.timings:
        raise UsageError(
            f"state {job.state} needs seconds by layer", remedy="a profile that times each layer"
        )
    if parts is None:
        what = f"no plan fits that keeps {WORDS[job.state]} in parts"
        raise with_hint(NoPlanFitsError(what, remedy="a smaller margin"), fleet, profile, job)
    return parts


def _placed(fleet: Fleet, profile: Profile, job: Job, given: bool) -> PlanResult:
    """Wishes about layers need all shapes, whatever was asked for."""
    if given:
        raise UsageError("place and a given split or keep_all contradict each other", remedy="one of the two")
    if not profile.timings:
        raise UsageError("place needs seconds by layer", remedy="a profile that times each layer")
    from evener.planner.whole import plan_whole

    return _with_worth(fleet, profile, plan_whole(fleet, profile, job, None))


def _with_worth(fleet: Fleet, profile: Profile, result: PlanResult) -> PlanResult:
    """The result with what its report needs to compare each device's part with what it would do alone."""
    plan, told = result.plan, result.plan.prediction
    shares = [share for _, _, stage in plan.numbered_stages() for share in stage.shares]
    if plan.is_data_parallel or told is None or any(len(s.devices) > 1 for s in shares):
        return result  # what one device of a tensor-parallel group does alone was not measured
    model = CostModel(fleet=fleet, profile=profile)
    unbounded = {
        name: unbounded_samples_per_s(model, fleet.device(name).kind, plan.global_batch)
        for name in plan.devices
        if name not in told.solo_samples_per_s
    }
    worth = useful_samples(model, plan)
    told = replace(told, useful_samples=worth, unbounded_samples_per_s=unbounded)
    return replace(result, plan=replace(plan, prediction=told))


def _narrow(profile: Profile) -> str:
    if profile.timings:
        return "only data parallelism was considered; --shapes all looks at pipelines too"
    return "only data parallelism was considered: the profile has no seconds by layer"
