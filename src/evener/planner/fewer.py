"""Whether hosts exchange less often than once a step: in ways that the job allows, where predicted faster.

A split that a slow link forbids may be the best one if hosts meet seldom, so each way is planned anew with
links between hosts as much faster as they are used less, and priced with the links as they are.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from evener.core.exchange import exchange_of
from evener.core.fewer import Fewer
from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.core.plan import Plan, Prediction, Reduction
from evener.core.profile import Profile
from evener.cost.exchange import LEAST_GAIN, Choice, choose_way, compressed_parts, transport_of
from evener.cost.fewer import BUFFERS, apart_seconds, bytes_between, with_links_times
from evener.cost.overlap import gradient_buckets
from evener.errors import NoPlanFitsError
from evener.planner.data_parallel import plan_data_parallel
from evener.planner.groups import groups_of, ms
from evener.planner.predict import pool_of
from evener.planner.result import Alternative, PlanResult

TRIED = (2, 4, 8, 16, 32, 64)
"""Global batches between exchanges that are looked at where the job names no number."""
ENOUGH = 0.1
"""The least of them that leaves exchanges at most this part of the time is taken: fewer cost exactness."""
_HIDDEN = 1e-6  # a link's seconds where an exchange goes on beside the steps


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan with fewer exchanges; seconds and bytes between hosts are those of one global batch."""

    plan: Plan
    fewer: Fewer
    batch_s: float
    batch_bytes: float
    exchange_part: float
    gap: float

    def __str__(self) -> str:
        return f"{self.fewer} {ms(self.batch_s)} and {self.batch_bytes / 1e6:.3g} MB between hosts"


def with_fewer(fleet: Fleet, profile: Profile, job: Job, result: PlanResult) -> PlanResult:
    """`result`, or the plan with fewer exchanges that is predicted to save at least `LEAST_GAIN` of a global
    batch's seconds; the sentence why, either way, is in the plan's `why`, and where it is not used in the
    reasons too.

    Example: 1 s a step on each of two hosts and 8 s an exchange: every step 9 s or one host alone 2 s,
    local:16 1.5 s.
    """
    plan = result.plan
    assert plan.prediction is not None
    before = plan.prediction.step_s
    found, refused = [], []
    for fewer in job.fewer:
        try:
            candidate = _best(fleet, profile, job, fewer)
        except NoPlanFitsError as e:
            candidate, why = None, e.what
        else:
            why = "one host, or links between hosts that are not known"
        if candidate:
            found.append(candidate)
        else:
            refused.append(f"{fewer}: {why}")
    said = "; ".join([*map(str, found), *refused])
    best = min(found, key=lambda c: c.batch_s, default=None)
    if best is None or best.batch_s > before * (1 - LEAST_GAIN):
        why = f"one exchange a step takes {ms(before)}; {said}"
        unused = f"--fewer {','.join(map(str, job.fewer))} is not used: {why}"
        return replace(
            result, plan=replace(plan, why=_joined(plan.why, unused)), reasons=(*result.reasons, unused)
        )
    why = f"{best.fewer} saves {1 - best.batch_s / before:.0%} of {ms(before)} for every global batch: {said}"
    chosen = replace(
        best.plan,
        fewer=replace(best.fewer, why=why),
        inexact=(*best.plan.inexact, best.fewer.sentence(best.plan.global_batch)),
        why=_joined(best.plan.why, why),
    )
    one = Alternative(name="one exchange a step", step_s=before, samples=plan.samples_by_device())
    others = [Alternative(name=str(c.fewer), step_s=c.batch_s) for c in found if c is not best]
    return replace(
        result,
        plan=chosen,
        status="within" if best.gap else "proven",
        gap=best.gap,
        limiter=best.plan.why,
        alternatives=(*result.alternatives, one, *others),
    )


def _best(fleet: Fleet, profile: Profile, job: Job, fewer: Fewer) -> Candidate | None:
    """The way with its own number, or with the least of those tried that leaves exchanges little time."""
    if fewer.how == "delayed" or fewer.every is not None:
        return _candidate(fleet, profile, job, fewer)
    found = None
    for every in TRIED:
        found = _candidate(fleet, profile, job, replace(fewer, every=every))
        if found is None or found.exchange_part <= ENOUGH:
            break
    return found


def _candidate(fleet: Fleet, profile: Profile, job: Job, fewer: Fewer) -> Candidate | None:
    plain = replace(job, fewer=(), sums=job.sums if fewer.how == "accumulate" else "grouped")
    if fewer.how == "accumulate":
        return _larger(fleet, profile, plain, fewer)
    factor = _HIDDEN if fewer.how == "delayed" else 1 / (fewer.every or 1)
    planned = plan_data_parallel(with_links_times(fleet, factor), profile, plain)
    plan = planned.plan
    way = _way(fleet, profile, plan, job)
    if way is None:
        return None
    exchange = exchange_of(way.reductions, plan.devices)
    assert exchange is not None and plan.prediction is not None
    num_bytes = _gradient_bytes(profile)
    exchange_s = way.way.seconds(num_bytes)
    local_s = max(_group_s(fleet, profile, plain, plan, group) for group in exchange.groups)
    step_s = apart_seconds(fewer, local_s, exchange_s)
    told = _predicted(plan.prediction, step_s, fleet, BUFFERS[fewer.how] * num_bytes)
    lossy = compressed_parts(way.reductions)
    reductions = tuple(_by_itself(r, fleet) if r.part is None else r for r in way.reductions)
    plan = replace(plan, reductions=reductions, prediction=told, inexact=lossy, fewer=fewer)
    return Candidate(
        plan=plan,
        fewer=fewer,
        batch_s=step_s,
        batch_bytes=bytes_between(num_bytes, exchange) / (fewer.every or 1),
        exchange_part=1 - local_s / step_s,
        gap=max(0.0, 1 - planned.bound_s / step_s),
    )


def _by_itself(group: Reduction, fleet: Fleet) -> Reduction:
    """A group of a host in which members sum among themselves: over what their types have for it."""
    return replace(group, transport=transport_of({fleet.device(d).type for d in group.devices}))


def _larger(fleet: Fleet, profile: Profile, job: Job, fewer: Fewer) -> Candidate | None:
    """One step for so many global batches: the planner's plan for the larger batch."""
    every = fewer.every or 1
    split = job.batch_per_device
    larger = replace(
        job,
        global_batch=every * job.global_batch,
        batch_per_device={d: every * n for d, n in split.items()} if split else None,
    )
    planned = plan_data_parallel(fleet, profile, larger)
    plan = planned.plan
    assert plan.prediction is not None
    exchange = exchange_of(plan.reductions, plan.devices)
    hosts = {fleet.device(d).host for d in plan.devices}
    if len(hosts) < 2:
        return None
    num_bytes = _gradient_bytes(profile)
    between = bytes_between(num_bytes, exchange) if exchange else 2 * (len(hosts) - 1) * num_bytes
    reduce_s = max(causes.get("reduce", 0.0) for causes in plan.prediction.seconds.values())
    return Candidate(
        plan=replace(plan, fewer=fewer),
        fewer=fewer,
        batch_s=plan.prediction.step_s / every,
        batch_bytes=between / every,
        exchange_part=reduce_s / plan.prediction.step_s,
        gap=planned.gap,
    )


def _way(fleet: Fleet, profile: Profile, plan: Plan, job: Job) -> Choice | None:
    """How hosts exchange at all, in groups and lanes; None for one host, or where a link is not known."""
    if len({fleet.device(d).host for d in plan.devices}) < 2:
        return None
    sizes = [_gradient_bytes(profile)]
    way = choose_way(fleet, plan.devices, sizes, sums="grouped", compress=job.compress)
    return None if way.way.name == "ring" else way


def _gradient_bytes(profile: Profile) -> float:
    return float(sum(b.num_bytes for b in gradient_buckets(profile)))


def _group_s(fleet: Fleet, profile: Profile, job: Job, plan: Plan, group: tuple[str, ...]) -> float:
    """Seconds of a step that `group` takes by itself."""
    samples = {p.devices[0]: p.samples for p in plan.pipelines if p.devices[0] in group and p.samples}
    if not samples:
        return 0.0
    own = replace(job, global_batch=sum(samples.values()), batch_per_device=None)
    only = fleet.only(tuple(samples))
    pool = pool_of(only, profile, own, groups_of(only, profile, own), micro_batch=job.micro_batch)
    split = pool.fixed(samples)
    assert split is not None, "the same devices hold the same samples in the whole plan"
    return split.step_s


def _predicted(told: Prediction, step_s: float, fleet: Fleet, more_bytes: float) -> Prediction:
    """The prediction of a plan whose step takes `step_s`; what its causes leave of that goes to the sums.

    `more_bytes` lie in host memory, which is the memory of devices that are CPUs.
    """
    scale = step_s / told.step_s
    seconds = {}
    for name, causes in told.seconds.items():
        busy = {c: s for c, s in causes.items() if c not in ("wait", "reduce")}
        left = max(0.0, step_s - sum(busy.values()))
        wait = min(left, causes.get("wait", 0.0))
        seconds[name] = {**busy, "wait": wait, "reduce": left - wait}
    memory = {
        n: b + (int(more_bytes) if fleet.device(n).type == "cpu" else 0) for n, b in told.memory_bytes.items()
    }
    return replace(
        told,
        step_s=step_s,
        lower_s=told.lower_s * scale,
        upper_s=told.upper_s * scale,
        seconds=seconds,
        memory_bytes=memory,
    )


def _joined(before: str, more: str) -> str:
    return f"{before}; {more}" if before else more
