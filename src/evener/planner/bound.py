"""A step that no plan of any shape can beat: work over speed, without fill, transfers or reduction."""

import numpy as np

from evener.core.job import Job
from evener.planner.blocks import Tables


def least_seconds_of_any(tables: Tables, job: Job) -> float:
    """Seconds a step at least, for every way to share layers and samples among the devices.

    Give layer l any weight u_l ≥ 0. A device that spends s seconds on samples of layers moves weight at most
    s · max_l u_l / t_l, t_l being its least seconds a sample; all N samples through all layers weigh N·Σ
    u_l. Hence

        T ≥ N·Σ u_l / Σ_devices max_l (u_l / t_l)

    for every u; tried are the times of each kind and their mean, which is the bound of a linear program when
    the kinds differ by one factor. Example: 8 samples, 2 devices of 1 s and 3 s a sample: 8 / (1 + 1/3) = 6
    s.
    """
    samples = job.global_batch
    times, counts = [], []
    for group in tables.groups:
        layers = tables.model.layers(group.kind)
        most = min(layers.largest, samples)
        sizes = sorted({b for b in (1, *(int(s) for s in layers.sizes), most) if b <= most})
        rows = [np.sum(layers.seconds(b), axis=0) / b for b in sizes]
        times.append(np.maximum(np.minimum.reduce(rows), 1e-30))
        counts.append(len(group.names))
    best = 0.0
    for u in (*times, np.mean(times, axis=0)):
        rate = sum(k * float((u / t).max()) for k, t in zip(counts, times, strict=True))
        best = max(best, samples * float(u.sum()) / rate)
    fastest = np.minimum.reduce(times).sum()  # one sample must pass every layer
    return max(best, float(fastest))
