"""What a data-parallel split will take: seconds with bounds and causes, bytes, and each device alone."""

from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.core.plan import Prediction
from evener.core.profile import Profile
from evener.cost.overlap import gradient_buckets
from evener.cost.step import MODEL_ERROR, StepCost, step_cost
from evener.planner.groups import Group
from evener.planner.loads import Load
from evener.planner.subsets import Pool, Split


def pool_of(
    fleet: Fleet,
    profile: Profile,
    job: Job,
    groups: tuple[Group, ...],
    *,
    micro_batch: int | None,
    side: int = 0,
) -> Pool:
    """The groups that can run at least one sample, with the figures of `side` (see `step_cost`)."""
    usable = tuple(g for g in groups if g.cap and g.cost)
    loads = []
    for group in usable:
        assert group.cost is not None
        cost = step_cost(profile, group.kind, side) if side else group.cost
        loads.append(Load(cost=cost, cap=group.cap, global_batch=job.global_batch, micro_batch=micro_batch))
    return Pool(
        fleet=fleet,
        groups=usable,
        loads=tuple(loads),
        buckets=gradient_buckets(profile),
        global_batch=job.global_batch,
        sums=job.sums,
        compress=job.compress,
    )


def predict(pool: Pool, groups: tuple[Group, ...], profile: Profile, job: Job, split: Split) -> Prediction:
    """Seconds a step, the causes by device (they add up to the step), bytes, and samples per second alone.

    Bounds take every figure at value × (1 ∓ spread) and add `MODEL_ERROR` on both sides.
    """
    edges = []
    for side in (-1, 1):
        other = pool_of(pool.fleet, profile, job, groups, micro_batch=job.micro_batch, side=side)
        found = other.fixed(split.samples)
        edges.append((found or split).step_s * (1 + side * MODEL_ERROR))
    costs = {n: load.cost for g, load in zip(pool.groups, pool.loads, strict=True) for n in g.names}
    seconds = {n: _busy_by_cause(costs[n], k, split.micro_batches[n]) for n, k in split.samples.items()}
    ends = {name: sum(causes.values()) for name, causes in seconds.items()}
    last = max(ends.values())
    for name, causes in seconds.items():
        causes["wait"] = last - ends[name]
        causes["reduce"] = max(split.step_s - last, 0.0)
    solo, solo_seconds = solo_rates(pool, groups, profile, job)
    return Prediction(
        step_s=split.step_s,
        lower_s=edges[0],
        upper_s=edges[1],
        memory_bytes={n: int(costs[n].peak_bytes[split.micro_batches[n]]) for n in split.samples},
        solo_samples_per_s=solo,
        solo_seconds=solo_seconds,
        seconds=seconds,
    )


def _busy_by_cause(cost: StepCost, samples: int, micro_batch: int) -> dict[str, float]:
    full, rest = divmod(samples, micro_batch)
    both = cost.forward_s + cost.backward_s
    rows_s = float(cost.rows_s[rest or min(samples, micro_batch)])
    return {
        "compute": float(full * both[micro_batch] + both[rest]),
        "input": float(full * cost.input_s[micro_batch] + cost.input_s[rest]),
        "optimizer": cost.update_s,
        "overhead": cost.overhead_s,
    } | ({"transfer": rows_s} if rows_s else {})


def solo_rates(
    pool: Pool, groups: tuple[Group, ...], profile: Profile, job: Job
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Samples per second of each device that runs the whole global batch alone, in its own best micro-batch,
    and seconds of a sample by cause then. A device that cannot hold the model is absent.
    """
    alone = pool_of(pool.fleet, profile, job, groups, micro_batch=None)
    rates: dict[str, float] = {}
    seconds: dict[str, dict[str, float]] = {}
    for g, group in enumerate(alone.groups):
        best = alone.split(tuple(int(i == g) for i in range(len(alone.groups))))
        if best is not None and group.cost is not None:
            (micro_batch,) = best.micro_batches.values()
            causes = _busy_by_cause(group.cost, job.global_batch, micro_batch)
            for name in group.names:
                rates[name] = job.global_batch / best.step_s
                seconds[name] = {c: s / job.global_batch for c, s in causes.items() if c != "compute"}
    order = [d.name for d in pool.fleet.devices if d.name in rates]
    return {n: rates[n] for n in order}, {n: seconds[n] for n in order}
