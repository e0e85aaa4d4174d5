"""A step of a plan of stages with owners, played by the plan's own schedule."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from evener.core.ownership import check_owners
from evener.core.plan import Plan
from evener.core.routes import Routes
from evener.cost.actions import plan_costs
from evener.cost.model import CostModel
from evener.cost.owned import OwnedCost
from evener.cost.owned_stages import StagedOwners, layers_of
from evener.cost.several import play_bytes
from evener.schedules.make import make
from evener.schedules.timing import Moment, times

_COMPUTE = ("F", "B", "I", "W")


def play_in_stages(model: CostModel, plan: Plan) -> OwnedCost:
    """Price a plan of stages with owners.

    Raises PlanMismatchError for owners that cannot be carried out. Example: two pipelines cut alike, all
    state in halves: each device steps half of its stage, the sums take as long as half a ring, and values as
    long again, of which the second stage sees nothing while the pipeline fills.
    """
    check_owners(plan, [x.name for x in model.profile.layers])
    routes, costs = Routes(plan), plan_costs(model, plan)
    name = "1f1b" if plan.schedule == "unequal" else plan.schedule
    played = times(make(plan, name=name, costs=costs), routes, costs)
    owners = StagedOwners(model=model, plan=plan)
    rows = {d: [m for m in row if m.action.type in _COMPUTE] for d, row in played.moments.items()}
    ends = {d: max((m.end_s for m in row), default=0.0) for d, row in rows.items()}
    compute_end, seconds = max(ends.values()), {}
    for d, row in rows.items():
        waited = sum(s for (_, device, _, _), s in costs.gather_s.items() if device == d)
        told = {
            "compute": sum(m.end_s - m.start_s for m in row) - waited,
            "optimizer": costs.update_s[d],
            "overhead": costs.overhead_s[d],
            "transfer": waited,
            "reduce": played.barrier_s - compute_end,
        }
        busy = sum(told.values()) - told["reduce"]
        own_end = max(ends[d], costs.update_s[d] + costs.overhead_s[d])
        told["bubble"] = max(own_end - busy, 0.0)
        told["wait"] = max(compute_end - own_end, 0.0)
        seconds[d] = told
    return OwnedCost(
        step_s=played.barrier_s,
        compute_end_s=compute_end,
        summed_s=played.barrier_s,
        seconds=seconds,
        memory_bytes={d: _peak_bytes(owners, routes, d, row) for d, row in rows.items()},
        gather_s=dict.fromkeys(rows, ()),
    )


def _peak_bytes(owners: StagedOwners, routes: Routes, device: str, row: Sequence[Moment]) -> float:
    """The most that `device` holds; of several stages, what it would hold less what owners spare it."""
    model = owners.model
    here = [r for r in routes.stages if device in r.devices]
    if len(here) > 1:
        return play_bytes(model, routes, device, row) - owners.spared(
            device, layers_of(model, routes, device)
        )
    (route,), (first, last) = here, model.span(here[0].stage)
    samples = next(s.samples for s in route.stage.shares if device in s.devices) if row else 0
    flying, most = Counter[str](), 1
    for moment in row:
        flying[moment.action.type] += 1
        most = max(most, flying["F"] - flying["B"] - flying["W"])
    own = owners.bytes_of(device)
    i, j = np.int64(first), np.int64(last)
    peak = float(own.peak(i, j, samples, most, recompute=route.stage.recompute))
    if not owners.keeps_gradients:
        return peak
    if not own.counted:  # gradients on their way are whole ones
        return peak + float(model.bytes.underway(i, j) - own.underway(i, j))
    gone = owners.bytes_of(device, gradients=False)
    sizes = [size for *_, size in owners.units(route)]
    small = max((size for size in sizes if size <= model.bytes.bucket_bytes), default=0.0)
    computes = float(gone.peak(i, j, samples, most, recompute=route.stage.recompute)) + small
    return max(computes, float(own.held(i, j) + own.update[last] - own.update[first]))
