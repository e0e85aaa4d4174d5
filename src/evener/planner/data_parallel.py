"""Uneven data parallelism: one pipeline of one stage a device, in parts that end together."""

from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.profile import Profile
from evener.core.words import counted
from evener.cost.exchange import compressed_parts
from evener.errors import NoPlanFitsError, UnknownNameError, UsageError
from evener.planner.aim import Aim, aim_of
from evener.planner.explain import alternatives, assumptions, left_out, limiter
from evener.planner.groups import Group, groups_of, ms
from evener.planner.predict import pool_of, predict
from evener.planner.result import PlanResult
from evener.planner.subsets import Pool, Split, best_split


def plan_data_parallel(fleet: Fleet, profile: Profile, job: Job) -> PlanResult:
    """The fastest split of the global batch over any subset of the devices.

        T = max_r(update_r + overhead_r + t_r(n_r) + exposed reduction after r)

    t_r(n) is the time of n samples in the best micro-batches, the steady state has each device update,
    compute and then meet the others. Example (case K14): 4 and 12 ms a sample, 16 samples: 12 and 4, 48 ms.
    Raises NoPlanFitsError, UnknownNameError (kind, device), UsageError.
    """
    _check(fleet, job)
    groups = groups_of(fleet, profile, job)
    pool = pool_of(fleet, profile, job, groups, micro_batch=job.micro_batch)
    if not pool.groups:
        raise NoPlanFitsError(
            "no device can hold the whole model",
            numbers="; ".join(f"{g.kind}: {g.refusal}" for g in groups),
            remedy="a smaller memory margin, a device with more memory, or a pipeline over several devices",
        )
    aim = aim_of(fleet, job)
    split, bound = _chosen(pool, job, groups, aim)
    _check_limits(job, aim, split)
    skipped = left_out(pool, job, groups, split, aim)
    gap = max(0.0, 1 - bound / aim.value(split.step_s, split.samples))
    prediction = predict(pool, groups, profile, job, split)
    limits = limiter(prediction)
    names = tuple(split.samples)
    reductions = pool.way(names).reductions if len(names) > 1 else ()
    drafted = Plan(
        global_batch=job.global_batch,
        pipelines=tuple(_pipeline(profile, name, split) for name in split.samples),
        reductions=reductions,
        left_out=skipped,
        inexact=compressed_parts(reductions),
        prediction=prediction,
        why=limits,
    )
    return PlanResult(
        plan=drafted,
        status="proven" if gap < 1e-9 else "within",
        gap=0.0 if gap < 1e-9 else gap,
        limiter=limits,
        reasons=(*assumptions(pool, groups, split, job), *_parts_untried(profile, groups, job)),
        alternatives=alternatives(pool, prediction, job, aim),
    )


def _parts_untried(profile: Profile, groups: tuple[Group, ...], job: Job) -> tuple[str, ...]:
    """Where devices are too small for the whole model: what was not looked at."""
    small = [n for g in groups if g.cost is not None and not g.cap for n in g.names]
    if not small or job.state != "replicated" or not profile.timings:
        return ()
    return (f"{', '.join(small)} cannot hold the model; --state auto looks at state in unequal parts too",)


def _check(fleet: Fleet, job: Job) -> None:
    known = {d.name for d in fleet.devices}
    unknown = sorted(set(job.batch_per_device or {}) - known)
    if unknown:
        raise UnknownNameError(
            f"--batch-per-device names {', '.join(unknown)}, which the fleet does not hold",
            remedy=f"one of: {', '.join(sorted(known))}",
        )
    if (
        job.keep_all
        and job.batch_per_device
        and len([n for n in job.batch_per_device.values() if n]) < len(known)
    ):
        raise UsageError(
            "--keep-all and --batch-per-device contradict each other: a device is given no sample",
            remedy="one of the two",
        )


def _chosen(pool: Pool, job: Job, groups: tuple[Group, ...], aim: Aim) -> tuple[Split, float]:
    if job.batch_per_device is not None:
        given = {n: k for n, k in job.batch_per_device.items() if k}
        order = [d.name for d in pool.fleet.devices if d.name in given]
        found = pool.fixed({n: given[n] for n in order})
        if found is None:
            raise _misfit(pool, groups, given)
        return found, aim.value(found.step_s, found.samples)
    if job.keep_all:
        counts = tuple(len(g.names) for g in pool.groups)
        missing = [n for g in groups if not g.cap for n in g.names]
        found = None if missing else pool.split(counts, least=1)
        if found is None:
            raise _cannot_keep_all(pool, job, groups, missing)
        return found, aim.value(found.step_s, found.samples)
    best, bound = best_split(pool, aim)
    if best is None and (aim.by_money or job.max_price_per_hour is not None):
        raise _too_dear(pool, job)
    if best is None:
        limits = "; ".join(
            f"{g.names[0]} takes micro-batches up to {load.cap}"
            for g, load in zip(pool.groups, pool.loads, strict=True)
        )
        raise NoPlanFitsError(
            f"the devices cannot take {counted(job.global_batch, 'sample')} in micro-batches of "
            f"{job.micro_batch}",
            numbers=limits,
            remedy=f"a micro-batch of {max(x.cap for x in pool.loads)} or less",
        )
    return best, bound


def _check_limits(job: Job, aim: Aim, split: Split) -> None:
    if job.max_step_s is not None and split.step_s > job.max_step_s:
        raise NoPlanFitsError(
            f"the fastest plan misses the limit of {ms(job.max_step_s)} a step",
            numbers=f"it takes {ms(split.step_s)}",
            remedy=f"--max-step {split.step_s:.4g} or more, a smaller global batch, or more devices",
        )
    if not aim.allowed(split.samples):
        price = aim.per_hour(split.samples)
        raise NoPlanFitsError(
            "the devices asked for cost more an hour than --max-price",
            numbers=f"{price:.4g} an hour, the limit is {job.max_price_per_hour:.4g}",
            remedy=f"--max-price {price:.4g}, or fewer devices",
        )


def _too_dear(pool: Pool, job: Job) -> NoPlanFitsError:
    fastest, _ = best_split(pool, Aim(prices={}))
    step_s = fastest.step_s if fastest else float("inf")
    prices = [d.price_per_hour.value for d in pool.fleet.devices if d.price_per_hour]
    return NoPlanFitsError(
        "no set of devices keeps the limits on price and time",
        numbers=(
            f"the cheapest device costs {min(prices):.4g} an hour, the fastest plan takes {ms(step_s)}; "
            f"limits: {job.max_price_per_hour or 'none'} an hour, {job.max_step_s or 'none'} s a step"
        ),
        remedy="a higher limit, or a smaller global batch",
    )


def _misfit(pool: Pool, groups: tuple[Group, ...], given: dict[str, int]) -> NoPlanFitsError:
    reasons = [f"{n}: {g.refusal}" for g in groups for n in g.names if given.get(n) and not g.cap]
    for group, load in zip(pool.groups, pool.loads, strict=True):
        for name in group.names:
            if given.get(name) and load.micro_batch is not None and load.micro_batch > load.cap:
                reasons.append(f"{name}: micro-batch {load.micro_batch} is above the {load.cap} that fit")
    return NoPlanFitsError(
        "the given split does not fit the devices",
        numbers="; ".join(reasons),
        remedy="0 samples for the devices named, or a smaller micro-batch",
    )


def _cannot_keep_all(pool: Pool, job: Job, groups: tuple[Group, ...], missing: list[str]) -> NoPlanFitsError:
    if missing:
        numbers = "; ".join(f"{n}: {g.refusal}" for g in groups for n in g.names if n in missing)
        return NoPlanFitsError(
            f"keep_all: {', '.join(missing)} cannot hold the model", numbers=numbers, remedy="leave them out"
        )
    count = sum(len(g.names) for g in pool.groups)
    return NoPlanFitsError(
        "keep_all: the devices cannot all take part",
        numbers=f"{counted(job.global_batch, 'sample')} for {counted(count, 'device')}",
        remedy=f"a global batch of {count} or more, or keep_all off",
    )


def _pipeline(profile: Profile, name: str, split: Split) -> Pipeline:
    size = split.micro_batches[name]
    stage = Stage(
        layers=tuple(x.name for x in profile.layers), shares=(Share(devices=(name,), samples=size),)
    )
    return Pipeline(samples=split.samples[name], micro_batch=size, stages=(stage,))
