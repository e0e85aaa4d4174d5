"""Whether state is kept in unequal parts: the fastest that fits, against plans that keep it whole."""

from msgspec.structs import replace

from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.core.ownership import WORDS, held_by
from evener.core.plan import HELD, Held, LeftOut, Plan, Prediction
from evener.core.profile import Profile
from evener.cost.evaluate import bounds_of
from evener.cost.model import CostModel
from evener.cost.owned_memory import owners_of
from evener.cost.worth import unbounded_samples_per_s
from evener.errors import NoPlanFitsError, OutOfRangeError, UnknownNameError
from evener.planner.aim import Aim, aim_of
from evener.planner.explain import limiter
from evener.planner.groups import Group, gib, groups_of, ms
from evener.planner.owned import OwnedSearch
from evener.planner.owned_prices import OwnedPlan
from evener.planner.predict import pool_of, solo_rates
from evener.planner.result import Alternative, PlanResult

LEAST_GAIN = 0.005
"""More is kept in parts only where that saves so much of a step."""
_SLOWER = 0.01  # a sample must take so much longer for want of memory before parts are looked at


def plan_unequal(fleet: Fleet, profile: Profile, job: Job) -> PlanResult | None:
    """The best data-parallel plan that keeps state in parts; None where none fits or `job` wants none.

    With "auto", only where some device's memory limits a plan that keeps all state everywhere, and then the
    fastest that fits: more is kept in parts only where a step is `LEAST_GAIN` shorter. Errors of the tables
    (far outside) pass through.
    """
    groups, refused = _groups(fleet, profile, job)
    model = CostModel(fleet=fleet, profile=profile)
    if job.state == "replicated" or not groups or (job.state == "auto" and not _is_short(model, job, groups)):
        return None
    aim = aim_of(fleet, job)
    wanted: tuple[Held, ...] = HELD if job.state == "auto" else (job.state,)
    searches = {held: OwnedSearch(model=model, job=job, aim=aim, groups=groups, held=held) for held in wanted}
    found = {held: search.best() for held, search in searches.items()}
    best: OwnedPlan | None = None
    for one in found.values():
        if one is not None and (best is None or one.value < best.value * (1 - LEAST_GAIN)):
            best = one
    if best is None or best.value == float("inf") or best.cost.step_s > (job.max_step_s or float("inf")):
        return None
    return _result(model, profile, job, groups, refused, searches, found, best)


def better(one: PlanResult | None, other: PlanResult | None, fleet: Fleet, job: Job) -> PlanResult | None:
    """The better of a plan that keeps state whole and one that keeps it in parts, the loser named.

    The first wins within `LEAST_GAIN` of the second.
    """
    if one is None or other is None:
        return one or other
    aim = aim_of(fleet, job)
    values = [
        aim.value(r.plan.prediction.step_s, r.plan.devices) if r.plan.prediction else float("inf")
        for r in (one, other)
    ]
    best, loser = (other, one) if values[1] < values[0] * (1 - LEAST_GAIN) else (one, other)
    told = loser.plan.prediction
    held = held_by(loser.plan)
    name = f"{WORDS[held]} in unequal parts" if held else "all state on every device that holds a layer"
    name += ", the model cut" if held and not loser.plan.is_data_parallel else ""
    known = {a.name for a in best.alternatives}
    left = [a for a in loser.alternatives if a.name not in known and a.name.startswith("state and samples")]
    return replace(
        best,
        alternatives=(
            *best.alternatives,
            Alternative(
                name=name,
                step_s=told.step_s if told else None,
                samples=loser.plan.samples_by_device(),
            ),
            *left,
        ),
        gap=min(best.gap, 1.0),
    )


def with_hint(
    error: NoPlanFitsError, fleet: Fleet, profile: Profile, job: Job, *, stages: bool = False
) -> NoPlanFitsError:
    """The refusal of a job that keeps all state whole, with what would fit in unequal parts.

    With `stages` also where pipelines cut the model. Where that does not help either, with the bytes that it
    needs.
    """
    if job.state != "auto":
        auto = replace(job, state="auto")
        found = plan_unequal(fleet, profile, auto)
        if found is None and stages:
            from evener.planner.owned_stages import plan_stages

            found = plan_stages(fleet, profile, auto, levels_in_stages(auto))
        if found is not None and found.plan.prediction is not None:
            held = held_by(found.plan)
            assert held is not None
            way = (
                f"--state auto: {WORDS[held]} in unequal parts over {len(found.plan.devices)} devices fit, "
                f"{ms(found.plan.prediction.step_s)} a step"
            )
            return _with(error, remedy=f"{error.remedy}, or {way}" if error.remedy else way)
    groups, _ = _groups(fleet, profile, job)
    if not groups:
        return error
    held = "parameters" if job.state == "auto" or job.state == "replicated" else job.state
    search = OwnedSearch(
        model=CostModel(fleet=fleet, profile=profile),
        job=job,
        aim=Aim(prices={}),
        groups=groups,
        held=held,
    )
    whole = search.bytes_with(1, 0.0)
    state = search.bytes_with(1, 1.0) - whole
    room = sum(max(g.usable_bytes - whole, 0.0) * len(g.names) for g in groups)
    words = (
        f"{WORDS[search.held]} in unequal parts: {gib(state)} to be kept, {gib(room)} free on all devices "
        f"beside the {gib(whole)} that each needs for one sample"
    )
    return _with(error, numbers=f"{error.numbers}; {words}" if error.numbers else words)


def _with(error: NoPlanFitsError, *, numbers: str = "", remedy: str = "") -> NoPlanFitsError:
    return NoPlanFitsError(error.what, numbers=numbers or error.numbers, remedy=remedy or error.remedy)


def _groups(fleet: Fleet, profile: Profile, job: Job) -> tuple[tuple[Group, ...], dict[str, str]]:
    """Groups of devices that layers were timed on, and by device why another cannot be used."""
    model = CostModel(fleet=fleet, profile=profile)
    kept: list[Group] = []
    refused: dict[str, str] = {}
    for group in groups_of(fleet, profile, job):
        try:
            model.layers(group.kind)
        except (UnknownNameError, OutOfRangeError) as e:
            refused |= dict.fromkeys(group.names, f"{e.what} ({e.numbers})")
        else:
            kept.append(group)
    return tuple(kept), refused


def is_short(fleet: Fleet, profile: Profile, job: Job) -> bool:
    """Whether memory keeps a device out of plans that hold all state everywhere, or slows it down."""
    groups, _ = _groups(fleet, profile, job)
    return _is_short(CostModel(fleet=fleet, profile=profile), job, groups)


def levels_in_stages(job: Job) -> tuple[Held, ...]:
    """What plans that cut the model may keep in parts for this job: never parameters."""
    return tuple(h for h in HELD if h != "parameters" and job.state in ("auto", h))


def _is_short(model: CostModel, job: Job, groups: tuple[Group, ...]) -> bool:
    """Whether memory keeps a device out, or its micro-batches so small that a sample takes longer."""
    return any(_slower_by(model, job, g) > _SLOWER for g in groups if g.usable_bytes < float("inf"))


def _slower_by(model: CostModel, job: Job, group: Group) -> float:
    """How much longer a sample takes in micro-batches that fit than in the best that was measured."""
    table = model.layers(group.kind)
    sizes = [int(b) for b in table.sizes if b <= job.global_batch] or [1]
    each = {b: sum(float(x.sum()) for x in table.seconds(b)) / b for b in {*sizes, max(group.cap, 1)}}
    fitting = [s for b, s in each.items() if b <= group.cap]
    return min(fitting, default=float("inf")) / min(each.values()) - 1


def _result(
    model: CostModel,
    profile: Profile,
    job: Job,
    groups: tuple[Group, ...],
    refused: dict[str, str],
    searches: dict[Held, OwnedSearch],
    found: dict[Held, OwnedPlan | None],
    best: OwnedPlan,
) -> PlanResult:
    held = best.plan.owners[0].held
    search = searches[held]
    prediction = _prediction(model, profile, job, best)
    gap = 1.0 if search.aim.by_money else max(0.0, 1 - search.bound_s() / best.cost.step_s)
    limits = limiter(prediction)
    rest = [
        f"{WORDS[h]} in parts: {ms(p.cost.step_s) if p else 'does not fit'}"
        for h, p in found.items()
        if h != held
    ]
    plan = replace(
        best.plan,
        left_out=_left_out(model.fleet, refused, searches, best),
        prediction=prediction,
        why=f"{_sentence(best)}; {limits}",
    )
    alternatives = []
    for rule, weights in search.rules().items():
        ways = [way for way in (s.by(weights) for s in searches.values()) if way is not None]
        way = min(ways, key=lambda w: w.value, default=None)
        alternatives.append(
            Alternative(
                name=f"state and samples {rule}",
                step_s=way.cost.step_s if way else None,
                samples=way.plan.samples_by_device() if way else {},
                note="" if way else "does not fit",
            )
        )
    return PlanResult(
        plan=plan,
        status="proven" if gap < 1e-9 else "within",
        gap=gap,
        limiter=limits,
        reasons=(_sentence(best), *rest, *_assumed(model, best.plan)),
        alternatives=tuple(alternatives),
    )


def _sentence(best: OwnedPlan) -> str:
    """Example: "the optimiser's state in parts 5:3:2 by memory, samples 8:4:4 by speed (a/0, a/1, a/2)"."""
    parts = best.plan.owners[0].parts
    taken = best.plan.samples_by_device()
    names = list(parts)
    return (
        f"{WORDS[best.plan.owners[0].held]} in parts {':'.join(str(parts[n]) for n in names)} by memory, "
        f"samples {':'.join(str(taken[n]) for n in names)} by speed ({', '.join(names)})"
    )


def _prediction(model: CostModel, profile: Profile, job: Job, best: OwnedPlan) -> Prediction:
    lower_s, upper_s = bounds_of(model, best.plan, best.cost.step_s)
    owners = owners_of(profile, model.bytes, best.plan)
    groups = groups_of(model.fleet, profile, job)
    pool = pool_of(model.fleet, profile, job, groups, micro_batch=None)
    rates, solo_seconds = solo_rates(pool, groups, profile, job) if pool.groups else ({}, {})
    return Prediction(
        step_s=best.cost.step_s,
        lower_s=lower_s,
        upper_s=upper_s,
        memory_bytes={n: int(b) for n, b in best.cost.memory_bytes.items()},
        solo_samples_per_s=rates,
        solo_seconds=solo_seconds,
        unbounded_samples_per_s={
            n: unbounded_samples_per_s(model, model.fleet.device(n).kind, job.global_batch)
            for n in best.plan.devices
            if n not in rates
        },
        seconds=best.cost.seconds,
        owned_bytes={n: int(owners.owned_bytes(n)) for n in best.plan.devices},
    )


def _left_out(
    fleet: Fleet, refused: dict[str, str], searches: dict[Held, OwnedSearch], best: OwnedPlan
) -> tuple[LeftOut, ...]:
    used = set(best.plan.devices)
    out = []
    for device in fleet.devices:
        if device.name not in used:
            with_it = min((s.least_with(device.name) for s in searches.values()), default=float("inf"))
            reason = refused.get(device.name, "no plan with it promises to be faster")
            if with_it <= best.cost.step_s:
                reason = f"with it a step takes {ms(with_it)}, next to nothing less than without it"
            elif with_it < float("inf"):
                reason = f"the best plan found with it takes {ms(with_it)}, without it {ms(best.cost.step_s)}"
            out.append(LeftOut(device=device.name, reason=reason))
    return tuple(out)


def _assumed(model: CostModel, plan: Plan) -> list[str]:
    said = []
    pairs = [(a, b) for i, a in enumerate(plan.devices) for b in plan.devices[:i]]
    if any(model.fleet.link(a, b) is None for a, b in pairs):
        said.append("assumed: what goes between devices that the fleet does not link costs nothing")
    unknown = [n for n in plan.devices if model.fleet.device(n).memory_bytes is None]
    if unknown:
        said.append(f"assumed: enough memory on {', '.join(unknown)}, whose memory the fleet does not give")
    return said
