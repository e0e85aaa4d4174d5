"""How many pipelines of each template: a linear program, rounding and filling.

    maximise Σ x_p · n_p(D)   with   Σ x_p · mix_p ≤ counts

n_p(D) are the samples pipeline p takes in D seconds. The smallest D with at least the global batch is the
step. The program has one row a class, so that its optimum uses few templates and little is lost by rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evener.planner.ladder import Mix, Template

_PIVOTS = 400
_EXACT_STATES = 1200


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """Templates as arrays; `extra` seconds come on top of the fill."""

    templates: tuple[Template, ...]
    mix: np.ndarray
    fill: np.ndarray
    period: np.ndarray
    size: np.ndarray
    extra: np.ndarray

    def samples(self, seconds: float) -> np.ndarray:
        """Samples each template takes within `seconds`, in whole micro-batches."""
        left = seconds - self.fill - self.extra
        number = 1 + np.floor(left / self.period * (1 + 1e-12))
        return np.where(left >= 0, np.maximum(number, 0.0) * self.size, 0.0)

    def only(self, rows: np.ndarray) -> "Shelf":
        """The templates at `rows`."""
        parts = {f: getattr(self, f)[rows] for f in ("mix", "fill", "period", "size", "extra")}
        return Shelf(templates=tuple(self.templates[i] for i in np.flatnonzero(rows)), **parts)


def shelf(templates: Sequence[Template], extra: np.ndarray) -> Shelf:
    """The templates as arrays."""
    return Shelf(
        templates=tuple(templates),
        mix=np.array([t.mix for t in templates], dtype=float).reshape(len(templates), -1),
        fill=np.array([t.fill_s for t in templates]),
        period=np.array([t.period_s for t in templates]),
        size=np.array([float(t.micro_batch) for t in templates]),
        extra=extra,
    )


def relaxed(mix: np.ndarray, values: np.ndarray, counts: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """(bound, parts of pipelines by template, price by class) of the linear program, by revised simplex.

    Starts from the slack basis; the entering template is the one with the largest reduced value.
    Example: one class of 5 devices, templates of 1 (value 2) and 2 (value 5): optimum 12.5, price 2.5.
    """
    rows = len(counts)
    columns = np.vstack([mix, np.eye(rows)])
    worth = np.concatenate([values, np.zeros(rows)])
    basis = np.arange(len(mix), len(mix) + rows)
    price = np.zeros(rows)
    level = counts.astype(float)
    for _ in range(_PIVOTS):
        square = columns[basis].T
        level = np.linalg.solve(square, counts)
        price = np.linalg.solve(square.T, worth[basis])
        reduced = worth - columns @ price
        entering = int(reduced.argmax())
        if reduced[entering] <= 1e-9 * max(1.0, float(np.abs(worth).max())):
            break
        direction = np.linalg.solve(square, columns[entering])
        ratios = np.where(direction > 1e-12, level / np.where(direction > 1e-12, direction, 1.0), np.inf)
        leaving = int(ratios.argmin())
        if not np.isfinite(ratios[leaving]):
            break
        basis[leaving] = entering
    price = np.maximum(price, 0.0)
    # Prices off by rounding, or by pivots cut short, are raised until no template is worth more.
    short = (values - mix @ price).max(initial=0.0)
    bound = float(counts @ price) + (short * counts.sum() if short > 0 else 0.0)
    parts = np.zeros(len(mix))
    for place, column in enumerate(basis):
        if column < len(mix):
            parts[column] = max(level[place], 0.0)
    return bound, parts, price


def pack(held: Shelf, counts: Mix, seconds: float) -> tuple[float, dict[int, int]]:
    """(samples, pipelines by template) of a good packing within `seconds`: floor of the program, then fill
    up.
    """
    values = held.samples(seconds)
    useful = values > 0
    left = np.array(counts, dtype=float)
    chosen: dict[int, int] = {}
    total = 0.0
    while useful.any():
        fits = useful & (held.mix <= left).all(axis=1)
        if not fits.any():
            break
        rows = np.flatnonzero(fits)
        _, parts, price = relaxed(held.mix[rows], values[rows], left)
        whole = np.floor(parts + 1e-9).astype(int)
        if not whole.any():
            # Less than one of each: the template that wins most over the price of its devices, fullest first.
            margin = values[rows] - held.mix[rows] @ price
            best = int(np.lexsort((values[rows], np.round(margin, 9)))[-1])
            whole[best] = 1
        for i in np.flatnonzero(whole):
            chosen[int(rows[i])] = chosen.get(int(rows[i]), 0) + int(whole[i])
            left = left - whole[i] * held.mix[rows[i]]
            total += whole[i] * values[rows[i]]
    return total, chosen


def pack_exactly(held: Shelf, counts: Mix, seconds: float) -> tuple[float, dict[int, int]]:
    """(samples, pipelines by template) of the best packing within `seconds`, by a table over all mixes."""
    values = held.samples(seconds)
    best_of: dict[Mix, int] = {}
    for i in np.argsort(values):
        if values[i] > 0:
            best_of[held.templates[i].mix] = int(i)
    table = np.zeros(tuple(k + 1 for k in counts))
    came = np.full(table.shape, -1, dtype=int)
    for part, i in best_of.items():
        onto = tuple(slice(k, None) for k in part)
        rest = tuple(slice(None, size - k) for k, size in zip(part, table.shape, strict=True))
        for _ in range(min(n // k for n, k in zip(counts, part, strict=True) if k)):
            better = table[rest] + values[i] > table[onto]
            table[onto] = np.where(better, table[rest] + values[i], table[onto])
            came[onto] = np.where(better, i, came[onto])
    chosen: dict[int, int] = {}
    at = tuple(counts)
    while came[at] >= 0:
        i = int(came[at])
        chosen[i] = chosen.get(i, 0) + 1
        at = tuple(a - b for a, b in zip(at, held.templates[i].mix, strict=True))
    return float(table[tuple(counts)]), chosen


def fewest_seconds(held: Shelf, counts: Mix, global_batch: int) -> tuple[float, dict[int, int]]:
    """The packing that takes the global batch soonest, by bisection over the step."""
    states = int(np.prod([k + 1 for k in counts]))
    packing = pack_exactly if states <= _EXACT_STATES else pack
    high = float((held.fill + held.extra + (global_batch / held.size) * held.period).min())
    low = 0.0
    found = packing(held, counts, high)[1]
    for _ in range(30 if packing is pack else 16):
        if high - low < 1e-3 * high:
            break
        middle = 0.5 * (low + high)
        total, chosen = packing(held, counts, middle)
        if total >= global_batch:
            high, found = middle, chosen
        else:
            low = middle
    return high, found
