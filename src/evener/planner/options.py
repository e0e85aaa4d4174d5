"""Every pipeline that a few devices can form: all orders, shared stages and cuts; exact for small fleets.

A pipeline under 1F1B takes about fill + (m - 1)·period for m micro-batches, so that an option is a straight
line in m. For each set of devices only the lines that are lowest somewhere are kept.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from evener.planner.blocks import Block, Tables
from evener.planner.suffixes import Suffixes

Counts = tuple[int, ...]
_MOST_SHORT = 5
KEPT = 12
CUTS_KEPT = 2


@dataclass(frozen=True, kw_only=True)
class Option:
    """One pipeline: blocks in order, where each begins, and what a step of m micro-batches takes.

    `fill_s` includes what shared stages reduce by themselves; `beside_s` is added when other pipelines hold
    the same layers, at the cheapest reduction there can be.
    """

    blocks: tuple[Block, ...]
    cuts: tuple[int, ...]
    micro_batch: int
    fill_s: float
    period_s: float
    beside_s: float = 0.0
    most_micro_batches: int | None = None

    def allows(self, samples: int) -> bool:
        """Whether so many samples keep to the number of micro-batches that the memory was counted for."""
        return self.most_micro_batches is None or samples <= self.most_micro_batches * self.micro_batch


def sequences(counts: Counts, most_members: int = 3) -> Iterator[tuple[Block, ...]]:
    """All ordered ways to put exactly these devices into stages of up to `most_members` devices."""
    if not any(counts):
        yield ()
        return
    for block in blocks_within(counts, most_members):
        rest = tuple(k - block.count(g) for g, k in enumerate(counts))
        for others in sequences(rest, most_members):
            yield (block, *others)


def blocks_within(counts: Counts, most_members: int) -> Iterator[Block]:
    """All blocks that these devices can form."""
    have = [g for g, k in enumerate(counts) if k]
    for size in range(1, most_members + 1):
        for block in itertools.combinations_with_replacement(have, size):
            if all(block.count(g) <= counts[g] for g in set(block)):
                yield block


def sub_counts(counts: Counts) -> Iterator[Counts]:
    """All non-empty count vectors up to `counts`."""
    for chosen in itertools.product(*(range(k + 1) for k in counts)):
        if any(chosen):
            yield chosen


def options_of(suffixes: Suffixes, counts: Counts, global_batch: int, most_members: int) -> list[Option]:
    """The options of exactly these devices that are fastest for some number of samples."""
    found: list[Option] = []
    tables = suffixes.tables
    for blocks in sequences(counts, most_members):
        if len(blocks) <= tables.num_layers:
            longest = min(len(blocks), _MOST_SHORT if suffixes.tries_all(len(blocks)) else 2)
            short = range(1, longest) if tables.is_tight(blocks) else ()
            for most in (None, *short):
                found += _best_cuts(suffixes, blocks, global_batch, most)
    return lowest(found, global_batch)


def lowest(options: list[Option], global_batch: int, keep: int = KEPT) -> list[Option]:
    """The `keep` fastest for each number of samples, and two of each micro-batch, alone and beside others."""
    if not options:
        return []
    samples = np.arange(1, global_batch + 1)
    if len(samples) > 64:
        samples = np.unique(np.geomspace(1, global_batch, 64).round().astype(int))
    kept: set[int] = set()
    sizes = np.array([o.micro_batch for o in options])
    alike = [np.arange(len(options)), *(np.flatnonzero(sizes == b) for b in np.unique(sizes))]
    for beside in (False, True):
        seconds = seconds_of(options, samples, beside=beside)
        for rows, most in zip(alike, [keep] + [2] * (len(alike) - 1), strict=True):
            first = min(most, len(rows))
            kept |= set(rows[np.argpartition(seconds[rows], first - 1, axis=0)[:first]].ravel().tolist())
    return [options[i] for i in sorted(kept)]


def seconds_of(options: Sequence[Option], samples: np.ndarray, *, beside: bool) -> np.ndarray:
    """Estimated seconds by (option, samples); a smaller last micro-batch counts by its part of the period."""
    fill = np.array([o.fill_s + (o.beside_s if beside else 0.0) for o in options])[:, None]
    period = np.array([o.period_s for o in options])[:, None]
    size = np.array([o.micro_batch for o in options])[:, None]
    most = np.array([o.most_micro_batches or np.inf for o in options])[:, None]
    number = samples[None, :] / size
    return np.where(number <= most, fill + np.maximum(number - 1, 0.0) * period, np.inf)


def _best_cuts(
    suffixes: Suffixes, blocks: tuple[Block, ...], global_batch: int, most: int | None
) -> list[Option]:
    """The best cuts of one order for each micro-batch size, all at once; arrays are sizes × cuts.

    With `most` for runs of so few micro-batches that less memory is held.
    """
    tables, sizes, count = suffixes.tables, suffixes.sizes, len(blocks)
    held = tuple(min(count - s, most or count) for s in range(count))
    cuts = suffixes.cuts(blocks, held)
    if not len(cuts):
        return []
    forward, backward = [], []
    for s, block in enumerate(blocks):
        f, b = tables.stacked(block, sizes, held[s])
        forward.append(f[:, cuts[:, s], cuts[:, s + 1]])
        backward.append(b[:, cuts[:, s], cuts[:, s + 1]])
    work = np.array(forward) + np.array(backward)
    possible = np.isfinite(work).all(axis=0)
    if not possible.any():
        return []
    sends = np.zeros_like(work)
    for s in range(count - 1):
        sends[s] = tables.stacked_sends(blocks[s], blocks[s + 1], sizes)[:, cuts[:, s + 1]]
    work[:, ~possible] = 1e30
    shared, beside = _reductions(tables, blocks, cuts, np.array(backward), sends)
    fill = work.sum(axis=0) + 2 * sends.sum(axis=0) + shared
    period = _period(work, sends)
    beside = np.maximum(beside - shared, 0.0)
    numbers = _some_numbers(min(global_batch, most or global_batch))
    chosen: set[tuple[int, int]] = set()
    for extra in (np.zeros_like(beside), beside) if beside.any() else (beside,):
        for m in numbers:
            seconds = fill + extra + (m - 1) * period
            if len(cuts) > CUTS_KEPT:
                best = np.argpartition(seconds, CUTS_KEPT - 1, axis=1)[:, :CUTS_KEPT]
            else:
                best = np.broadcast_to(np.arange(len(cuts)), (len(sizes), len(cuts)))
            chosen |= {(row, int(c)) for row in range(len(sizes)) for c in best[row]}
    return [
        Option(
            blocks=blocks,
            cuts=tuple(int(c) for c in cuts[c]),
            micro_batch=sizes[row],
            fill_s=float(fill[row, c]),
            period_s=float(period[row, c]),
            beside_s=float(beside[row, c]),
            most_micro_batches=most,
        )
        for row, c in sorted(chosen)
        if possible[row, c]
    ]


def _reductions(
    tables: Tables, blocks: tuple[Block, ...], cuts: np.ndarray, backward: np.ndarray, sends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds after the pipeline's end until gradients are summed: by its shared stages alone, beside others.

    Stage s ends its last backward earlier than stage 0 by the backwards and sends before it. Its reduction
    shows for its first layer's at least, for all its layers' less its backward if that is more. Tied layers
    of two stages are summed behind all of that.
    """
    found = []
    for costs in (tables.shared_reduce_s, tables.least_reduce_s):
        after = np.broadcast_to(_ties(tables, blocks, cuts), backward.shape[1:])
        earlier = np.zeros(backward.shape[1:])
        for s, block in enumerate(blocks):
            if len(block) > 1 or costs == tables.least_reduce_s:
                first, last = cuts[:, s], cuts[:, s + 1]
                sums = costs(block)
                one, whole = sums[first + 1] - sums[first], sums[last] - sums[first]
                after = np.maximum(after, np.maximum(one, whole - backward[s]) - earlier)
            earlier = earlier + backward[s] + sends[s]
        found.append(after)
    return found[0], found[1]


def _ties(tables: Tables, blocks: tuple[Block, ...], cuts: np.ndarray) -> np.ndarray:
    """Seconds by cut to sum the gradients of tied layers that it puts on two stages."""
    seconds = np.zeros(len(cuts))
    for first, places in tables.model.bytes.tied.items():
        stages = np.array([(cuts[:, 1:-1] <= i).sum(axis=1) for i in places])
        for s, t in itertools.combinations(range(len(blocks)), 2):
            apart = (stages.min(axis=0) == s) & (stages.max(axis=0) == t)
            seconds[apart] += tables.tied_reduce_s(blocks[s], blocks[t])[first]
    return seconds


def _period(work: np.ndarray, sends: np.ndarray) -> np.ndarray:
    """The steady state of 1F1B for many cuts at once; see `evener.cost.pipeline`."""
    best = work.max(axis=0)
    for a in range(len(work)):
        total = work[a].copy()
        for b in range(a + 1, len(work)):
            total = total + work[b] + 2 * sends[b - 1]
            best = np.maximum(best, total / (b - a + 1))
    return best


def _some_numbers(most: int) -> list[int]:
    return sorted({1, 2, 3, most, *(2**k for k in range(2, most.bit_length()))} & set(range(1, most + 1)))
