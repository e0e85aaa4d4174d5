"""The best pipeline for every mix of device classes, built from the last stage forwards.

    f[c][k][i] = min over j, k' of max(t_k(i, j) + 2·send_{k,k'}(j), f[c - e_k][k'][j])

c counts the devices used by class, k is the class of the first of these stages, i its first layer. The
number of stages behind is |c|, so that the micro-batches in flight under 1F1B, and with them the memory,
are known exactly. The search does not grow with the number of devices, only with the number of classes and
stages.

With many mixes the minimum over j is found by bisection. That needs t rising in j, so that sends are taken
at the least of all later cuts, and f falling in j, so that f[..][j] stands for the best over all starts up
to j: the layers before j are left away, a stage that becomes empty by that is dropped when a template is
read. Both only make values smaller: they remain bounds, and a template read from them is a pipeline whose
exact time is evaluated later.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from evener.planner.blocks import Tables

Mix = tuple[int, ...]
_EXACT_MIXES = 400


@dataclass(frozen=True, kw_only=True)
class Template:
    """A pipeline by classes: about fill + (m - 1)·period for m micro-batches."""

    mix: Mix
    classes: tuple[int, ...]
    cuts: tuple[int, ...]
    micro_batch: int
    fill_s: float
    period_s: float


def stage_limit(counts: Mix, num_layers: int, most_mixes: int) -> int:
    """The most stages for which there are at most `most_mixes` mixes."""
    total = _mixes_by_stages(counts, min(sum(counts), num_layers))
    return max(1, int(np.searchsorted(total, most_mixes, side="right")))


def count_mixes(counts: Mix, most_stages: int) -> int:
    """Number of count vectors with 1 to `most_stages` devices."""
    return int(_mixes_by_stages(counts, most_stages)[-1])


def _mixes_by_stages(counts: Mix, limit: int) -> np.ndarray:
    ways = np.ones(1)
    for k in counts:
        ways = np.convolve(ways, np.ones(min(k, limit) + 1))[: limit + 1]
    return ways[1:].cumsum()


class Ladder:
    """f and the choices behind it for one micro-batch size; `templates` reads them out.

    `cuts` are the places where a pipeline may be cut, from 0 to the number of layers; all by default.
    """

    def __init__(
        self, tables: Tables, counts: Mix, micro_batch: int, most_stages: int, cuts: np.ndarray | None = None
    ) -> None:
        self.tables, self.counts, self.micro_batch = tables, counts, micro_batch
        self.cuts = np.arange(tables.num_layers + 1) if cuts is None else cuts
        layers = len(self.cuts) - 1
        self.most_stages = min(most_stages, layers)
        self.coarse = count_mixes(counts, most_stages) > _EXACT_MIXES
        self._level: list[dict[Mix, int]] = [{(0,) * len(counts): 0}]
        start = np.full((1, len(counts), layers + 1), np.inf)
        start[0, :, layers] = 0.0
        self._best = [start]
        self._fill = [np.where(np.isinf(start), 0.0, start)]
        self._from: list[np.ndarray] = [np.zeros((1, len(counts), layers + 1, 2), dtype=np.int16)]
        for stages in range(1, self.most_stages + 1):
            self._climb(stages)

    def _climb(self, stages: int) -> None:
        """All mixes of `stages` devices from those with one less."""
        number = len(self.counts)
        below = self._level[-1]
        here: dict[Mix, int] = {}
        for mix in below:
            for k in range(number):
                if mix[k] < self.counts[k]:
                    here.setdefault((*mix[:k], mix[k] + 1, *mix[k + 1 :]), len(here))
        size = len(self.cuts)
        best = np.full((len(here), number, size), np.inf)
        fill = np.zeros((len(here), number, size))
        came = np.zeros((len(here), number, size, 2), dtype=np.int16)
        for k in range(number):
            pairs = [
                (row, below[(*mix[:k], mix[k] - 1, *mix[k + 1 :])])
                for mix, row in here.items()
                if mix[k] and (*mix[:k], mix[k] - 1, *mix[k + 1 :]) in below
            ]
            if not pairs:
                continue
            rows, origin = (np.array(x) for x in zip(*pairs, strict=True))
            work = self.tables.stage((k,), self.micro_batch, stages).work_s[np.ix_(self.cuts, self.cuts)]
            step = len(rows) if self.coarse else 64
            for part in range(0, len(rows), step):
                now, old = rows[part : part + step], origin[part : part + step]
                self._extend(k, stages, work, now, old, best, fill, came)
        if self.coarse:
            _carry_on(best, fill, came)
        self._level.append(here)
        self._best.append(best)
        self._fill.append(fill)
        self._from.append(came)

    def _extend(self, k: int, stages: int, work, rows, origin, best, fill, came) -> None:
        """Put a stage of class k before the pipelines `origin`; arrays are mixes × i × j."""
        for after, sends in self._followers(k, stages):
            behind = self._best[-1][origin][:, after, :]
            which = behind.argmin(axis=1)
            suffix = np.take_along_axis(behind, which[:, None, :], axis=1)[:, 0, :]
            if self.coarse:
                sends = np.minimum.accumulate(sends[::-1])[::-1]
                j, value = _crossing(work + 2 * sends[None, :], suffix)
            else:
                seconds = np.maximum((work + 2 * sends[None, :])[None], suffix[:, None, :])
                j = seconds.argmin(axis=2)
                value = np.take_along_axis(seconds, j[:, :, None], axis=2)[:, :, 0]
            better = value < best[rows, k]
            chosen = np.array(after)[np.take_along_axis(which, j, axis=1)]
            rest = self._fill[-1][origin[:, None], chosen, j]
            total = np.where(np.isinf(value), 0.0, work[np.arange(len(work))[None], j] + 2 * sends[j] + rest)
            best[rows, k] = np.where(better, value, best[rows, k])
            fill[rows, k] = np.where(better, total, fill[rows, k])
            came[rows, k] = np.where(better[..., None], np.stack([j, chosen], axis=-1), came[rows, k])

    def _followers(self, k: int, stages: int) -> Iterator[tuple[list[int], np.ndarray]]:
        """Classes that may follow k, those with the same link seconds together."""
        if stages == 1:
            yield [0], np.zeros(len(self.cuts))
            return
        groups: dict[bytes, tuple[list[int], np.ndarray]] = {}
        for other in range(len(self.counts)):
            sends = self.tables.send_s((k,), (other,), self.micro_batch)[self.cuts]
            groups.setdefault(sends.tobytes(), ([], sends))[0].append(other)
        yield from groups.values()

    def templates(self) -> list[Template]:
        """The best pipeline of each mix that fits; a mix in which a device would idle is left away."""
        found = []
        for stages in range(1, self.most_stages + 1):
            first = self._best[stages][:, :, 0]
            for mix, row in self._level[stages].items():
                k = int(first[row].argmin())
                if np.isfinite(first[row, k]):
                    template = self._read(mix, stages, row, k)
                    if len(template.classes) == stages:
                        found.append(template)
        return found

    def _read(self, mix: Mix, stages: int, row: int, k: int) -> Template:
        value, total = float(self._best[stages][row, k, 0]), float(self._fill[stages][row, k, 0])
        classes, cuts, i, at, now = [], [0], 0, row, mix
        for level in range(stages, 0, -1):
            j, after = self._from[level][at, k, i].tolist()
            if j > i:
                classes.append(k)
                cuts.append(j)
            now = (*now[:k], now[k] - 1, *now[k + 1 :])
            if level > 1:
                at, k, i = self._level[level - 1][now], after, max(i, j)
        return Template(
            mix=mix,
            classes=tuple(classes),
            cuts=tuple(int(self.cuts[c]) for c in cuts),
            micro_batch=self.micro_batch,
            fill_s=total,
            period_s=value,
        )


def _crossing(rising: np.ndarray, falling: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(j, value) of min over j > i of max(rising[i, j], falling[n, j]) by bisection, for all n and i."""
    size = rising.shape[0]
    i = np.arange(size)[None, :]
    n = np.arange(len(falling))[:, None]
    low, high = (
        np.broadcast_to(np.minimum(i + 1, size - 1), (len(falling), size)),
        np.full((len(falling), size), size - 1),
    )
    low = low.copy()
    for _ in range(int(size).bit_length()):
        middle = (low + high) // 2
        right = (rising[i, middle] < falling[n, middle]) & (low < high)
        low = np.where(right, middle + 1, low)
        high = np.where(right, high, middle)
    before = np.maximum(low - 1, np.minimum(i + 1, size - 1))
    at, left = (np.maximum(rising[i, j], falling[n, j]) for j in (low, before))
    return np.where(left < at, before, low), np.minimum(left, at)


def _carry_on(best: np.ndarray, fill: np.ndarray, came: np.ndarray) -> None:
    """Let f[..][j] stand for the best over all starts up to j, with its choices."""
    start = np.arange(best.shape[2])[None, None, :]
    least = np.minimum.accumulate(best, axis=2)
    source = np.maximum.accumulate(np.where(best <= least, start, 0), axis=2)
    best[:] = np.take_along_axis(best, source, axis=2)
    fill[:] = np.take_along_axis(fill, source, axis=2)
    came[:] = np.take_along_axis(came, source[..., None], axis=2)
