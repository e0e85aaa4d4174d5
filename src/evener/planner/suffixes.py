"""Cuts worth a look for stages in a given order, where there are too many to try them all.

    f_s[i] = min over j of max(t_s(i, j) + 2·send_s(j), f_{s+1}[j])      the least slowest stage
    g_s[i] = min over j of     t_s(i, j) + 2·send_s(j) + g_{s+1}[j]      the least sum: for few micro-batches

for layers i to the end on stages s to the end. Orders that end alike share their suffixes.
"""

import itertools
import math

import numpy as np

from evener.planner.blocks import Block, Tables

_ALL_CUTS = 300


class Suffixes:
    """Candidate cuts for orders of blocks over one set of micro-batch sizes."""

    def __init__(self, tables: Tables, sizes: tuple[int, ...]) -> None:
        self.tables, self.sizes = tables, sizes
        self._all: dict[int, np.ndarray] = {}
        self._best: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}

    def tries_all(self, stages: int) -> bool:
        """Whether so many stages have few enough cuts to try them all."""
        return math.comb(self.tables.num_layers - 1, stages - 1) <= _ALL_CUTS

    def cuts(self, blocks: tuple[Block, ...], held: tuple[int, ...]) -> np.ndarray:
        """Cuts as rows (0, ..., L): all where they are few, else the best by f and by g for each size."""
        layers, stages = self.tables.num_layers, len(blocks)
        if self.tries_all(stages):
            if stages not in self._all:
                inner = itertools.combinations(range(1, layers), stages - 1)
                self._all[stages] = np.array([(0, *c, layers) for c in inner])
            return self._all[stages]
        rows = {row for sums in (False, True) for row in self._read(blocks, held, sums)}
        return np.array(sorted(rows)) if rows else np.zeros((0, stages + 1), dtype=int)

    def _read(self, blocks: tuple[Block, ...], held: tuple[int, ...], sums: bool) -> list[tuple[int, ...]]:
        first = self._suffix(blocks, held, sums)[0]
        fits = np.flatnonzero(np.isfinite(first[:, 0]))
        at = np.zeros(len(fits), dtype=int)
        columns = [at]
        for s in range(len(blocks)):
            at = self._suffix(blocks[s:], held[s:], sums)[1][fits, at]
            columns.append(at)
        return [tuple(int(i) for i in row) for row in np.stack(columns, axis=1)]

    def _suffix(
        self, blocks: tuple[Block, ...], held: tuple[int, ...], sums: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """(value, end of the first stage) by size and first layer."""
        key = (blocks, held, sums)
        if key not in self._best:
            forward, backward = self.tables.stacked(blocks[0], self.sizes, held[0])
            work = forward + backward
            size = self.tables.num_layers + 1
            if len(blocks) == 1:
                last = np.full((len(self.sizes), size), size - 1)
                self._best[key] = (work[:, :, -1], last)
            else:
                rest = self._suffix(blocks[1:], held[1:], sums)[0][:, None, :]
                sends = 2 * self.tables.stacked_sends(blocks[0], blocks[1], self.sizes)[:, None, :]
                values = work + sends + rest if sums else np.maximum(work + sends, rest)
                end = values.argmin(axis=2)
                self._best[key] = (np.take_along_axis(values, end[..., None], axis=2)[..., 0], end)
        return self._best[key]
