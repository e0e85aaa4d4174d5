"""When the gradients of a plan are summed: layer by layer from the end of the chain, behind the last
backward.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from evener.core.buckets import fill_buckets
from evener.cost.communication import Network
from evener.cost.memory import ModelBytes
from evener.cost.overlap import pieces_of

Sums = Callable[[tuple[str, ...], float, int], float]


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A device that holds layers `span`: when its last backward ends and what that took by layer.

    For a tensor-parallel group `device` is one of its `degree` devices: all do the same at once, each with
    its part of the gradients, `part_bytes` by layer.
    """

    device: str
    span: tuple[int, int]
    end_s: float
    backward_s: np.ndarray
    degree: int = 1
    part_bytes: np.ndarray | None = None


def reduction_ends(
    network: Network, model: ModelBytes, holders: Sequence[Holder], sum_s: Sums | None = None
) -> float:
    """Seconds at which the last gradient is summed; 0 when no layer has two holders.

    Layers with the same holders share buckets. A bucket starts when it is ready on all its holders and each
    of them is done with its bucket before: end = max(ready, ends before) + all-reduce. A layer above the
    bucket limit goes in pieces that become ready evenly; only the first and the last of them can set the end.
    Tied layers are summed with the first of them, by the holders of all, at the end of their last backward.
    `sum_s` is what one sum takes, by default the faster of one ring and two levels.
    Tensor-parallel groups meet in as many lanes as the smallest has devices, each summing its part.
    """
    number = {name: i for i, name in enumerate(dict.fromkeys(h.device for h in holders))}
    free = np.zeros(len(number))
    ready = _ready(holders, model.num_layers)
    for first, last, members in _segments(holders, model):
        names = tuple(dict.fromkeys(holders[m].device for m in members))
        if len(names) < 2:
            continue
        at = np.array([number[n] for n in names])
        there = ready[members]
        smallest = min((holders[m] for m in members), key=lambda h: h.degree)
        held = model.summed if smallest.part_bytes is None else smallest.part_bytes
        for bucket in fill_buckets([int(held[i]) for i in range(first, last)], model.bucket_bytes):
            layers = [first + i for i in bucket]
            num_bytes = float(held[layers].sum())
            if not num_bytes:
                continue
            pieces = pieces_of(num_bytes, model.bucket_bytes)
            one = (sum_s or network.all_reduce_s)(names, num_bytes / pieces, smallest.degree)
            begun, done = there[:, layers[-1] + 1], there[:, layers[-1]]
            first_piece = (begun + (done - begun) / pieces).max()
            free[at] = max(max(free[at].max(), first_piece) + pieces * one, done.max() + one)
    return float(free.max()) if len(free) else 0.0


def _ready(holders: Sequence[Holder], num_layers: int) -> np.ndarray:
    """Seconds at which the backward of each layer is done, by holder; column L stands for its start.

    Of a layer that it does not hold, as one tied to its own, the end of all.
    """
    table = np.empty((len(holders), num_layers + 1))
    for row, h in enumerate(holders):
        table[row] = h.end_s
        first, last = h.span
        before = np.concatenate([[0.0], h.backward_s[first:last].cumsum()])
        table[row, first : last + 1] = h.end_s - before
    return table


def _segments(holders: Sequence[Holder], model: ModelBytes) -> list[tuple[int, int, list[int]]]:
    """(first, end, holders) of runs of layers with the same holders, from the end of the chain."""
    edges = {edge for h in holders for edge in h.span} | {k for i in model.tied for k in (i, i + 1)}
    found: list[tuple[int, int, list[int]]] = []
    for a, b in reversed(list(itertools.pairwise(sorted({0, model.num_layers, *edges})))):
        places = model.tied.get(a, (a,))
        members = [i for i, h in enumerate(holders) if any(h.span[0] <= k < h.span[1] for k in places)]
        if found and found[-1][2] == members:
            b = found.pop()[1]
        found.append((a, b, members))
    return found
