"""The whole plan shape: pipelines → stages → shares, for fleets of any size."""

import math
from dataclasses import dataclass, field

from msgspec.structs import replace

from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.core.plan import LeftOut, Plan, Prediction
from evener.core.profile import Profile
from evener.cost.evaluate import CostModel, PlanCost, bounds_of, evaluate
from evener.cost.sums import with_groups
from evener.errors import NoPlanFitsError
from evener.planner.aim import Aim, aim_of
from evener.planner.baselines import alternatives_of, baselines
from evener.planner.blocks import Tables
from evener.planner.bound import least_money_of_any, least_seconds_of_any
from evener.planner.groups import ALLOW, Group, degrees_of, groups_of, ms
from evener.planner.many import affordable, classes_of, search_many, with_fewer_classes
from evener.planner.misfit import nothing_fits
from evener.planner.options import Counts, Option, options_of, sub_counts
from evener.planner.partitions import Judge, search
from evener.planner.predict import pool_of, solo_rates
from evener.planner.residences import on_hosts, why_resident
from evener.planner.result import Alternative, PlanResult
from evener.planner.shift import shifted
from evener.planner.suffixes import Suffixes
from evener.planner.teams import team_choices

_MOST_EVALUATED = 400
_MOST_SUMMED = 8
_FEW_ORDERS = 1500
_FEW_ORDERS_OF_MANY_LAYERS = 300
_FEW_LAYERS = 12
_EXACT_STATES = 600


def plan_whole(fleet: Fleet, profile: Profile, job: Job, flat: PlanResult | None) -> PlanResult:
    """The best plan of any shape; `flat` is the data-parallel one where some device holds the whole model.

    Raises NoPlanFitsError with the memory sum, and what the tables raise for kinds or layers not measured.
    """
    groups = groups_of(fleet, profile, job)
    model = CostModel(fleet=fleet, profile=profile)
    aim = aim_of(fleet, job)
    found = Search(model=model, job=job, aim=aim)
    tables = Tables(model=model, groups=groups, global_batch=job.global_batch)
    others: list[tuple[str, Plan | None]] = []
    if all(1 in degrees_of(profile, g.kind) for g in groups) or ALLOW not in job.allow:
        others = baselines(tables, job)
    found.add(tables, [p for _, p in others if p is not None])
    found.add(tables, [flat.plan] if flat is not None else [])
    for teamed in team_choices(groups, profile, job):
        found.run(teamed)
    if not found.priced:
        raise nothing_fits(tables, job)
    best, cost = _best(model, job, aim, found.priced)
    bound_s = least_seconds_of_any(tables, job)
    if aim.value(cost.step_s, best.devices) == math.inf or cost.step_s > (job.max_step_s or math.inf):
        raise _limits_clash(model, job, [(s, p) for s, p, _ in found.priced], bound_s)
    least = least_money_of_any(tables, job, aim.prices) if aim.by_money else bound_s
    gap = max(0.0, 1 - least / aim.value(cost.step_s, best.devices))
    return _result(tables, job, best, cost, others, flat, gap, found.with_device)


def _best(
    model: CostModel, job: Job, aim: Aim, priced: list[tuple[float, Plan, Tables]]
) -> tuple[Plan, PlanCost]:
    """The best plan with its last touches, or another near it whose sums, once they are chosen, take less."""
    ordered = sorted(priced, key=lambda x: aim.value(x[0], x[1].devices))
    _, first, tables = ordered[0]
    near = [shifted(tables, first, aim), *(p for _, p, _ in ordered[:_MOST_SUMMED])]
    summed = [with_groups(model, p, sums=job.sums, compress=job.compress) for p in near]
    costs = [(p, evaluate(model, p)) for p in summed]
    return min(costs, key=lambda x: aim.value(x[1].step_s, x[0].devices))


@dataclass(kw_only=True)
class Search:
    """Plans found so far with their exact seconds, for one choice of teams after another."""

    model: CostModel
    job: Job
    aim: Aim
    priced: list[tuple[float, Plan, Tables]] = field(default_factory=list)
    with_device: dict[str, float] = field(default_factory=dict)

    def add(self, tables: Tables, plans: list[Plan]) -> None:
        """Price plans made with `tables`."""
        for p in filter(None, (on_hosts(self.model, p) for p in plans)):
            step_s = evaluate(self.model, p).step_s
            self.priced.append((step_s, p, tables))
            for name in p.devices:
                self.with_device[name] = min(step_s, self.with_device.get(name, step_s))

    def run(self, groups: tuple[Group, ...]) -> None:
        """Search all shapes for few devices, else by mixes of classes."""
        tables = Tables(model=self.model, groups=groups, global_batch=self.job.global_batch)
        counts = tuple(len(g.names) for g in groups)
        few = _FEW_ORDERS if tables.num_layers <= _FEW_LAYERS else _FEW_ORDERS_OF_MANY_LAYERS
        if num_orders(counts) <= few:
            judge = Judge(tables=tables, global_batch=self.job.global_batch, aim=self.aim)
            search_few(judge, counts, self.job)
            if not self.aim.by_money:
                for name, value in judge.least_with.items():
                    self.with_device[name] = min(value, self.with_device.get(name, value))
            self.add(tables, [judge.plan(judge.best)] if judge.best else [])
            return
        if math.prod(k + 1 for k in counts) > _EXACT_STATES:
            tables = Tables(model=self.model, groups=classes_of(groups), global_batch=self.job.global_batch)
        for fewer in (x for some in affordable(tables, self.aim) for x in with_fewer_classes(some)):
            self.add(fewer, search_many(fewer, self.job))


def _limits_clash(
    model: CostModel, job: Job, priced: list[tuple[float, Plan]], bound: float
) -> NoPlanFitsError:
    step_s, fastest = min(priced, key=lambda x: x[0])
    prices = [d.price_per_hour for d in map(model.fleet.device, fastest.devices)]
    price = sum(p.value for p in prices if p)
    return NoPlanFitsError(
        "no plan keeps the limits on time and price",
        numbers=(
            f"the fastest takes {ms(step_s)} at {price:.4g} an hour, no plan can take less than {ms(bound)}; "
            f"limits: {job.max_step_s or 'none'} s a step, {job.max_price_per_hour or 'none'} an hour"
        ),
        remedy=f"--max-step {step_s:.4g} or more at that price, a smaller global batch, or more devices",
    )


def search_few(judge: Judge, counts: Counts, job: Job) -> None:
    """All shapes for a handful of devices."""
    suffixes = Suffixes(judge.tables, micro_batch_candidates(judge.tables, job))
    options: dict[Counts, list[Option]] = {}
    for some in sub_counts(counts):
        options[some] = options_of(suffixes, some, job.global_batch, 3)
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
    largest = max(tables.layers(g).largest for g in tables.groups)
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
    gap: float,
    with_device: dict[str, float],
) -> PlanResult:
    model = tables.model
    lower_s, upper_s = bounds_of(model, best, cost.step_s)
    groups = groups_of(model.fleet, model.profile, job)
    pool = pool_of(model.fleet, model.profile, job, groups, micro_batch=None)
    rates, solo_seconds = solo_rates(pool, groups, model.profile, job) if pool.groups else ({}, {})
    prediction = Prediction(
        step_s=cost.step_s,
        lower_s=lower_s,
        upper_s=upper_s,
        memory_bytes={n: int(b) for n, b in cost.memory_bytes.items()},
        solo_samples_per_s=rates,
        solo_seconds=solo_seconds,
        seconds=cost.seconds,
    )
    used = set(best.devices)
    reasons = {x.device: x.reason for x in flat.plan.left_out} if flat and flat.plan == best else {}
    out = tuple(
        LeftOut(device=d.name, reason=reasons.get(d.name) or _idle(d.name, with_device, cost.step_s))
        for d in model.fleet.devices
        if d.name not in used
    )
    limits = limiter_of(cost)
    plan = replace(best, prediction=prediction, left_out=out, why=limits)
    alternatives = alternatives_of(tables, others)
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
        reasons=_assumed(tables) + why_resident(model, plan, job),
        alternatives=tuple(alternatives),
    )


def _idle(name: str, with_device: dict[str, float], step_s: float) -> str:
    if name in with_device and step_s < with_device[name] < float("inf"):
        return f"the best plan found with it takes {ms(with_device[name])} or more, without it {ms(step_s)}"
    return "no plan found with it is better"


def _assumed(tables: Tables) -> tuple[str, ...]:
    said = []
    for a, b in sorted(tables.model.network.missing)[:3]:
        said.append(f"assumed: data between {a} and {b} costs nothing, the fleet names no link between them")
    unknown = [n for g in tables.groups if g.usable_bytes == float("inf") for n in g.names]
    if unknown:
        said.append(f"assumed: enough memory on {', '.join(unknown[:5])}, which the fleet does not give")
    return tuple(said)


def limiter_of(cost: PlanCost, *, owned: bool = False) -> str:
    """The sentence what a step is made of on the device that waits least; `owned`: state is in parts."""
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
        "transfer": (
            f"{name} waits for parameters of other owners for"
            if owned
            else f"{name} waits for copies between it and its host for"
        ),
    }[cause]
    return f"{what} {ms(causes[cause])} of a step of {ms(cost.step_s)}"
