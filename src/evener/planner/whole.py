"""The whole plan shape: pipelines → stages → shares, for fleets of any size."""

import math

from msgspec.structs import replace

from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.core.plan import LeftOut, Plan, Prediction
from evener.core.profile import Profile
from evener.cost.evaluate import CostModel, PlanCost, evaluate
from evener.cost.step import MODEL_ERROR
from evener.errors import NoPlanFitsError
from evener.planner.baselines import baselines
from evener.planner.blocks import Tables
from evener.planner.bound import least_seconds_of_any
from evener.planner.groups import gib, groups_of, ms
from evener.planner.many import classes_of, search_many
from evener.planner.options import Counts, Option, options_of, sub_counts
from evener.planner.partitions import Judge, search
from evener.planner.predict import pool_of, solo_rates
from evener.planner.result import Alternative, PlanResult
from evener.planner.shift import shifted

_MOST_EVALUATED = 400
_FEW_ORDERS = 1500
_EXACT_STATES = 600


def plan_whole(fleet: Fleet, profile: Profile, job: Job, flat: PlanResult | None) -> PlanResult:
    """The best plan of any shape; `flat` is the data-parallel one where some device holds the whole model.

    Raises NoPlanFitsError with the memory sum, and what the tables raise for kinds or layers not measured.
    """
    groups = groups_of(fleet, profile, job)
    model = CostModel(fleet=fleet, profile=profile)
    tables = Tables(model=model, groups=groups)
    counts = tuple(len(g.names) for g in groups)
    others = baselines(tables, job)
    candidates = [p for _, p in others if p is not None]
    bound = least_seconds_of_any(tables, job)
    if num_orders(counts) <= _FEW_ORDERS:
        judge = Judge(tables=tables, global_batch=job.global_batch)
        search_few(judge, counts, job)
        candidates += [judge.plan(judge.best)] if judge.best else []
    else:
        if math.prod(k + 1 for k in counts) > _EXACT_STATES:
            tables = Tables(model=model, groups=classes_of(groups))
        plans, many_bound = search_many(tables, job)
        candidates, bound = candidates + plans, max(bound, many_bound)
    if flat is not None:
        candidates.append(flat.plan)
    if not candidates:
        raise _nothing_fits(tables, job)
    priced = [(evaluate(model, p), p) for p in candidates]
    cost, best = min(priced, key=lambda x: x[0].step_s)
    best = shifted(tables, best)
    cost = evaluate(model, best)
    if job.max_step_s is not None and cost.step_s > job.max_step_s:
        raise NoPlanFitsError(
            f"the fastest plan misses the limit of {ms(job.max_step_s)} a step",
            numbers=f"it takes {ms(cost.step_s)}, and no plan can take less than {ms(bound)}",
            remedy=f"max_step_s of {cost.step_s:.4g} or more, a smaller global batch, or more devices",
        )
    return _result(tables, job, best, cost, others, flat, bound)


def search_few(judge: Judge, counts: Counts, job: Job) -> None:
    """All shapes for a handful of devices."""
    sizes = micro_batch_candidates(judge.tables, job)
    options: dict[Counts, list[Option]] = {}
    for some in sub_counts(counts):
        options[some] = options_of(judge.tables, some, sizes, job.global_batch, 3)
    search(judge, counts, options, _MOST_EVALUATED)


def num_orders(counts: Counts) -> float:
    """About how many ordered stage sequences these devices can form: Σ over subsets of ordered partitions."""
    total = sum(counts)
    if total > 8:
        return math.inf
    orders = [1, 1, 3, 13, 75, 541, 4683, 47293, 545835]
    same = math.prod(math.factorial(k) for k in counts)
    return sum(math.comb(total, k) * orders[k] for k in range(1, total + 1)) / same


def micro_batch_candidates(tables: Tables, job: Job) -> tuple[int, ...]:
    """Micro-batch sizes a pipeline may use: all up to 8, then about a factor of 1.4 apart."""
    if job.micro_batch is not None:
        return (job.micro_batch,)
    largest = max(tables.model.layers(g.kind).largest for g in tables.groups)
    top = min(largest * 3, job.global_batch)
    sizes = set(range(1, min(top, 8) + 1))
    size = 8.0
    while size * 1.42 <= top:
        size *= 1.42
        sizes.add(round(size))
    return tuple(sorted(sizes))


def _result(
    tables: Tables,
    job: Job,
    best: Plan,
    cost: PlanCost,
    others: list[tuple[str, Plan | None]],
    flat: PlanResult | None,
    bound: float,
) -> PlanResult:
    model = tables.model
    edges = []
    for side in (-1, 1):
        edge = CostModel(fleet=model.fleet, profile=model.profile, side=side)
        edges.append(evaluate(edge, best).step_s * (1 + side * MODEL_ERROR))
    groups = groups_of(model.fleet, model.profile, job)
    pool = pool_of(model.fleet, model.profile, job, groups, micro_batch=None)
    prediction = Prediction(
        step_s=cost.step_s,
        lower_s=min(edges[0], cost.step_s),
        upper_s=max(edges[1], cost.step_s),
        memory_bytes={n: int(b) for n, b in cost.memory_bytes.items()},
        solo_samples_per_s=solo_rates(pool, groups, model.profile, job) if pool.groups else {},
        seconds=cost.seconds,
    )
    used = set(best.devices)
    reasons = {x.device: x.reason for x in flat.plan.left_out} if flat and flat.plan == best else {}
    out = tuple(
        LeftOut(device=d.name, reason=reasons.get(d.name) or _idle(d.name))
        for d in model.fleet.devices
        if d.name not in used
    )
    limits = limiter_of(cost)
    gap = max(0.0, 1 - bound / cost.step_s)
    plan = replace(best, prediction=prediction, left_out=out, why=limits)
    alternatives = [
        Alternative(
            name=name,
            step_s=evaluate(model, p).step_s if p else None,
            samples=p.samples_by_device() if p else {},
            note="" if p else "does not fit",
        )
        for name, p in others
    ]
    if flat is not None:
        seconds = evaluate(model, flat.plan).step_s
        alternatives.append(
            Alternative(name="data parallel", step_s=seconds, samples=flat.plan.samples_by_device())
        )
    return PlanResult(
        plan=plan,
        status="proven" if gap < 1e-9 else "within",
        gap=gap,
        limiter=limits,
        reasons=_assumed(tables),
        alternatives=tuple(alternatives),
    )


def _idle(name: str) -> str:
    return f"no plan found with {name} is faster"


def _assumed(tables: Tables) -> tuple[str, ...]:
    said = []
    for a, b in sorted(tables.model.network.missing)[:3]:
        said.append(f"assumed: data between {a} and {b} costs nothing, the fleet names no link between them")
    unknown = [n for g in tables.groups if g.usable_bytes == float("inf") for n in g.names]
    if unknown:
        said.append(f"assumed: enough memory on {', '.join(unknown[:5])}, which the fleet does not give")
    return tuple(said)


def limiter_of(cost: PlanCost) -> str:
    """The sentence what a step is made of on the device that waits least."""
    name = min(cost.seconds, key=lambda n: cost.seconds[n]["wait"] + cost.seconds[n]["bubble"])
    causes = cost.seconds[name]
    cause = max(causes, key=lambda c: causes[c])
    what = {
        "compute": f"{name} computes for",
        "reduce": "the gradient reduction shows for",
        "bubble": f"{name} idles in fill, drain and transfers for",
        "wait": f"{name} waits for slower devices for",
        "optimizer": f"the optimiser on {name} takes",
        "overhead": f"fixed costs on {name} take",
    }[cause]
    return f"{what} {ms(causes[cause])} of a step of {ms(cost.step_s)}"


def _nothing_fits(tables: Tables, job: Job) -> NoPlanFitsError:
    data = tables.model.bytes
    held = float(data.fixed(0, data.num_layers))
    room = sum(g.usable_bytes * len(g.names) for g in tables.groups)
    acts = float(data.saved[-1])
    return NoPlanFitsError(
        "no plan fits the devices' memory",
        numbers=(
            f"parameters, gradients and optimiser need {gib(held)}, activations of a sample {gib(acts)}; "
            f"the devices offer {gib(room)} in all (margin {job.memory_margin:.0%})"
        ),
        remedy=(
            f"{gib(held - room)} more memory"
            if held > room
            else "a smaller micro-batch or margin, or larger devices"
        ),
    )
