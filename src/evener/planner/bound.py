"""A step that no plan of any shape can beat: work over speed, without fill, transfers or reduction."""

import numpy as np

from evener.core.job import Job
from evener.planner.blocks import Tables
from evener.planner.groups import ALLOW, degrees_of

_STEPS = 300


def least_seconds_of_any(tables: Tables, job: Job) -> float:
    """Seconds a step at least, for every way to share layers and samples among the devices.

    Give layer l any weight u_l ≥ 0. A device that spends s seconds on samples of layers moves weight at most
    s · max_l u_l / t_l, t_l being its least seconds a sample; all N samples through all layers weigh N·Σ
    u_l. Hence

        T ≥ N·Σ u_l / Σ_devices max_l (u_l / t_l)

    for every u. The times of each kind and their mean are tried, then weights are moved away from layers that
    devices prefer (multiplicative weights: towards the linear program's optimum, a bound at every step).
    Example: 8 samples, 2 devices of 1 s and 3 s a sample: 8 / (1 + 1/3) = 6 s.
    """
    samples = job.global_batch
    seconds = _seconds_a_sample(tables, job)
    many = np.array([float(len(g.names)) for g in tables.groups])
    starts = [*seconds, seconds.mean(axis=0)]
    bounds = [_bound(u, seconds, many) for u in starts]
    u = starts[int(np.argmax(bounds))]
    best = max(bounds)
    for step in range(_STEPS):
        preferred = (u / seconds).argmax(axis=1)
        served = np.zeros(len(u))
        np.add.at(served, preferred, many / seconds[np.arange(len(many)), preferred])
        u = u * np.exp(-served / served.sum() / np.sqrt(step + 1))
        best = max(best, _bound(u, seconds, many))
    fastest = 0.0 if ALLOW in job.allow else seconds.min(axis=0).sum()  # one sample must pass every layer
    return max(samples * best, float(fastest))


def _bound(u: np.ndarray, seconds: np.ndarray, counts: np.ndarray) -> float:
    return float(u.sum() / (counts * (u / seconds).max(axis=1)).sum())


def least_money_of_any(tables: Tables, job: Job, prices: dict[str, float]) -> float:
    """Money a step at least: every layer and sample on the device that does it for the least money.

    Example: 8 samples of 1 s at 3.60 an hour cost 0.008.
    """
    seconds = _seconds_a_sample(tables, job)
    price = np.array([min(prices[n] for n in g.names) for g in tables.groups])
    return float((seconds * price[:, None] / 3600).min(axis=0).sum() * job.global_batch)


def _seconds_a_sample(tables: Tables, job: Job) -> np.ndarray:
    """Least device-seconds a sample of each layer, in the best micro-batch and degree, by group and layer."""
    kinds = dict.fromkeys(g.kind for g in tables.groups)
    measured = {(k, d) for k in kinds for d in degrees_of(tables.model.profile, k)}
    degrees = sorted({d for _, d in measured if d == 1 or ALLOW in job.allow})
    rows = []
    for group in tables.groups:
        found = []
        for degree in degrees:
            if (group.kind, degree) in measured:
                layers = tables.model.layers(group.kind, degree)
                most = min(layers.largest, job.global_batch)
                sizes = sorted({b for b in (1, *(int(s) for s in layers.sizes), most) if b <= most})
                found += [degree * np.sum(layers.seconds(b), axis=0) / b for b in sizes]
        rows.append(np.minimum.reduce(found))
    return np.maximum(np.array(rows), 1e-30)
