"""What dense Adam does to rows without a gradient, for many steps at once.

In a step without gradient m and v decay and the row still moves. From its last step s₀ to now it moves by

    Σ_j  lr_s / bc1_s · β1^j · m / (√(β2^j · v / bc2_s) + ε),    s = s₀ + j,   bc_i = 1 - β_i^s

With a = √(v / bc2_s₀) and r_j = √(β2^j · bc2_s₀ / bc2_s) each term is c_j / (a·r_j + ε). Steps are taken in
stretches in which r_j stays near its middle r̄; there

    1 / (a·r_j + ε) = Σ_k (-1)^k · (r_j - r̄)^k · a^k / (a·r̄ + ε)^(k+1)

so that a stretch costs its moments Σ_j c_j (r_j - r̄)^k, shared by all rows with the same s₀. Terms below
1e-9 of the first missed step (float64: 1e-13) are left out; tests compare with the loop.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class Stretch:
    """Middle r̄ and moments of the steps from number `first` after a row's last one on, by row.

    Arrays of shape (rows,) and (order, rows), for the rows that missed as many.
    """

    first: int
    middle: np.ndarray
    moments: np.ndarray


def stretches(beta1: float, beta2: float, seen: int, precision: float) -> list[tuple[int, int]] | None:
    """First and last step (after a row's last one, `seen` or later) of each stretch; None: only a loop does.

    In a stretch √bc2 changes by a fifth at most, √(β2^j) by 15 %.
    Terms below `precision` of the first are left out.
    Example: 0.9, 0.999 and 1 give (1, 2), (3, 5), (6, 9), …; from step 1,000 on and for 1e-13 (1, 286) alone.
    """
    ratio = beta1 / math.sqrt(beta2) if beta2 else 1.0
    if not 0 < ratio < 0.999:
        return None
    last = math.ceil(math.log(precision) / math.log(ratio))
    longest = max(1, int(2 * math.log(0.85) / math.log(beta2)))
    found, first = [], 1
    while first <= last:
        end = min(last, max(first, int(1.5 * (seen + first)) - seen), first + longest - 1)
        found.append((first, end))
        first = end + 1
    return found if len(found) <= 48 else None


@lru_cache(maxsize=4)
def powers(beta: float, count: int) -> np.ndarray:
    """β⁰ to β^(count - 1): looked up, as raising costs more than all else here."""
    return beta ** np.arange(count)


def _room_for(steps: int) -> int:
    return 1 << (steps + 1).bit_length()


class IdleSteps:
    """The moments for rows whose last step was `seen`, out of the learning rates of all steps so far."""

    def __init__(self, beta1: float, beta2: float, decay: float, precision: float = 1e-13) -> None:
        self.betas, self.decay, self.precision = (beta1, beta2), decay, precision

    @property
    def leaps(self) -> bool:
        """Whether many steps can be made up for at once."""
        return stretches(*self.betas, 1, self.precision) is not None

    def kept(self, seen: np.ndarray, rates: np.ndarray) -> np.ndarray:
        """What decoupled decay leaves of a weight: Π (1 - lr·decay) over the steps after `seen`."""
        if not self.decay:
            return np.ones(len(seen))
        logs = np.concatenate([[0.0], np.cumsum(np.log1p(-rates * self.decay))])
        return np.exp(logs[len(rates)] - logs[seen])

    def of(self, seen: np.ndarray, rates: np.ndarray) -> list[Stretch]:
        """Stretches over the steps after `seen` (≥ 1 each, rising) until now, `len(rates)`.

        Rows that missed fewer steps than a stretch's first are the last ones, and not in it.
        """
        cuts = stretches(*self.betas, int(seen[0]), self.precision)
        assert cuts is not None
        now = len(rates)
        power1, power2 = (powers(beta, _room_for(now)) for beta in self.betas)
        found = []
        for first, last in cuts:
            last = min(last, int(now - seen[0]))
            if last < first:
                break
            since = seen[: np.searchsorted(seen, now - first, side="right")]
            j = np.arange(first, last + 1)[:, None]
            s = since + j
            missed = s <= now
            s = np.minimum(s, now)
            c = missed * (rates[s - 1] / (1 - power1[s]) * power1[j])
            if self.decay:
                c *= self.kept(s.ravel(), rates).reshape(s.shape)
            r = np.sqrt(power2[j] * (1 - power2[since]) / (1 - power2[s]))
            middle = (r.min(axis=0) + r.max(axis=0)) / 2
            off = r - middle
            order = _order(float((np.abs(off) / middle).max()), self.betas[0] ** first, self.precision)
            moments = np.empty((order, len(since)))
            for k in range(order):
                moments[k] = c.sum(axis=0)
                c = c * off
            found.append(Stretch(first, middle, moments))
        return found


def _order(off: float, size: float, precision: float) -> int:
    """Moments that a stretch needs: what follows is below `precision` of the first missed step."""
    order = 1
    while size * off**order > precision and order < 24:
        order += 1
    return order
