"""What dense Adam does to rows without a gradient, for many steps at once.

In a step without gradient m and v decay and the row still moves. From its last step s₀ to now it moves by

    Σ_j  lr_s / bc1_s · β1^j · m / (√(β2^j · v / bc2_s) + ε),    s = s₀ + j,   bc_i = 1 - β_i^s

With a = √(v / bc2_s₀) and r_j = √(β2^j · bc2_s₀ / bc2_s) each term is c_j / (a·r_j + ε). Steps are taken in
stretches in which r_j stays near its middle r̄; there

    1 / (a·r_j + ε) = Σ_k (-1)^k · (r_j - r̄)^k · a^k / (a·r̄ + ε)^(k+1)

so that a stretch costs its moments Σ_j c_j (r_j - r̄)^k, shared by all rows with the same s₀. Terms below
1e-14 of the first are left out. Error relative to the movement: below 1e-8 (tested against the loop).
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

ORDER = 10
_TAIL = 1e-14


@dataclass(frozen=True)
class Stretch:
    """Middle r̄ and `ORDER` moments of some steps, by row: arrays of shape (rows,) and (ORDER, rows)."""

    middle: np.ndarray
    moments: np.ndarray


@lru_cache(maxsize=16)
def stretches(beta1: float, beta2: float) -> tuple[tuple[int, int], ...] | None:
    """First and last step (after a row's last one) of each stretch; None where only a loop will do.

    Example: 0.9 and 0.999 give (1, 1), (2, 2), (3, 4), (5, 7), (8, 11), … up to 307.
    """
    ratio = beta1 / math.sqrt(beta2) if beta2 else 1.0
    if not 0 < ratio < 0.999 or beta1 == 0:
        return None
    last = math.ceil(math.log(_TAIL) / math.log(ratio))
    longest = max(1, int(2 * math.log(0.85) / math.log(beta2)))
    found, first = [], 1
    while first <= last:
        end = min(last, max(first, int(first * 1.5)), first + longest - 1)
        found.append((first, end))
        first = end + 1
    return tuple(found) if len(found) <= 48 else None


class IdleSteps:
    """The moments for rows whose last step was `seen`, out of the learning rates of all steps so far."""

    def __init__(self, beta1: float, beta2: float, decay: float) -> None:
        self.betas, self.decay = (beta1, beta2), decay
        self.cuts = stretches(beta1, beta2)

    def kept(self, seen: np.ndarray, rates: np.ndarray) -> np.ndarray:
        """What decoupled decay leaves of a weight: Π (1 - lr·decay) over the steps after `seen`."""
        if not self.decay:
            return np.ones(len(seen))
        logs = np.concatenate([[0.0], np.cumsum(np.log1p(-rates * self.decay))])
        return np.exp(logs[len(rates)] - logs[seen])

    def of(self, seen: np.ndarray, rates: np.ndarray) -> list[Stretch]:
        """Stretches over the steps after `seen` (≥ 1 each) until now, `len(rates)`."""
        assert self.cuts is not None
        beta1, beta2 = self.betas
        now = len(rates)
        found = []
        for first, last in self.cuts:
            if int((now - seen).max(initial=0)) < first:
                break
            j = np.arange(first, last + 1)[:, None]
            s = seen[None, :] + j
            there = s <= now
            bc1, bc2 = 1 - beta1**s, 1 - beta2**s
            c = np.where(there, rates[np.minimum(s, now) - 1] / bc1 * beta1**j, 0.0)
            if self.decay:
                flat = self.kept(np.minimum(s, now).ravel(), rates).reshape(s.shape)
                c = c * flat
            r = np.sqrt(beta2**j * (1 - beta2**seen) / bc2)
            lowest, highest = r.min(axis=0), r.max(axis=0)
            middle = (lowest + highest) / 2
            off, power, moments = r - middle, c, np.empty((ORDER, len(seen)))
            for k in range(ORDER):
                moments[k] = power.sum(axis=0)
                power = power * off
            found.append(Stretch(middle, moments))
        return found
