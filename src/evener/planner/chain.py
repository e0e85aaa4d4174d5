"""One chain of layers cut for stages in a fixed order, so that the slowest stage is as fast as can be: exact.

costs   stage 0: 1 1 1 1 1 1 1 1      cut 6 + 2: 6·1 and 2·3 = 6 is the least possible maximum
        stage 1: 3 3 3 3 3 3 3 3      (5 + 3 would be 9, 7 + 1 would be 7)
"""

import itertools
from collections.abc import Sequence

import numpy as np

from evener.core.words import counted
from evener.errors import NoPlanFitsError


def cut_chain(costs: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Number of layers of each stage; `costs[s][i]` is what layer i costs in stage s (seconds, bytes, ...).

    No stage is empty. Of all cuts with the smallest maximum of a stage's sum, one with the smallest total is
    chosen: by dynamic programming over (stages, layers) twice, first for the maximum, then for the total
    among the stages within it. NoPlanFitsError for more stages than layers.
    Example: cut_chain(([1.0] * 8, [3.0] * 8)) = (6, 2).
    """
    table = np.asarray(costs, dtype=float)
    stages, layers = table.shape
    if stages > layers:
        raise NoPlanFitsError(
            f"{counted(layers, 'layer')} cannot fill {counted(stages, 'stage')}",
            remedy=f"at most {counted(layers, 'stage')}",
        )
    sums = np.concatenate([np.zeros((stages, 1)), table.cumsum(axis=1)], axis=1)
    runs = sums[:, None, :] - sums[:, :, None]  # by (stage, first layer, one after the last)
    runs[:, np.arange(layers + 1)[:, None] >= np.arange(layers + 1)[None, :]] = np.inf
    least, _ = _best(runs, np.maximum)
    runs[runs > least * (1 + 1e-12)] = np.inf
    _, edges = _best(runs, np.add)
    return tuple(int(b - a) for a, b in itertools.pairwise(edges))


def _best(runs: np.ndarray, join: np.ufunc) -> tuple[float, list[int]]:
    """The least value of all cuts, a cut's value being its runs' joined by `join`, and the edges of one."""
    stages, edges = runs.shape[0], runs.shape[1]
    value = np.full(edges, np.inf)
    value[0] = 0.0
    came = []
    for stage in range(stages):
        joined = join(value[:, None], runs[stage])
        came.append(joined.argmin(axis=0))
        value = joined.min(axis=0)
    at, found = edges - 1, [edges - 1]
    for origin in reversed(came):
        at = int(origin[at])
        found.append(at)
    return float(value[-1]), found[::-1]
