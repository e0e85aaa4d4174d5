"""What accelerators copy to their hosts and back where owners keep state in parts: it travels by host memory.

backward   ▓▓ unit 1 ▓▓ out ▓▓ unit 0 ▓▓ out     a unit's gradients, while computing waits
step       home │ owner moves │ spread, spread   sums of what the device owns; its new values, unit by unit
forward    in ▓▓ unit 0 ▓▓ in ▓▓ unit 1 ▓▓       a unit's values, once they came: a copy for each other owner
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from evener.core.figures import Curve
from evener.core.fleet import Fleet


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Seconds by unit, in the model's order, of one device; nothing of a CPU, whose memory is its host's."""

    out: np.ndarray
    home: np.ndarray
    spread: np.ndarray
    into: np.ndarray

    @property
    def step_s(self) -> float:
        """What an owner's step takes more."""
        return float(self.home.sum() + self.spread.sum())

    @property
    def left_s(self) -> np.ndarray:
        """By unit, how long before the end of its step the owner's values of it have left for others."""
        return self.spread.sum() - self.spread.cumsum()


def copies_of(
    fleet: Fleet, parts: Mapping[str, np.ndarray], values: np.ndarray, gradients: np.ndarray
) -> dict[str, Copies]:
    """By device, what it copies of units of so many bytes of `values` and of `gradients`, owned in `parts`.

        out = link(gradients)   home = link(part · gradients)   spread = link(part · values)
        into = Σ over other owners of link(their part · values)

    The link is that between a device and its host, as the fleet has it; without one copies take no time.
    Who is alone copies gradients all the same, as sums are made on hosts, and spreads nothing.
    Example: parts 3:1 of 8 MB at 1 ms + 1 GB/s: the first device's out is 9 ms, home and spread are 7 ms,
    into is 3 ms.
    """
    names = list(parts)
    rows = np.array([parts[d] for d in names])
    found: dict[str, Copies] = {}
    known: dict[Curve | None, tuple[np.ndarray, ...]] = {}
    for i, name in enumerate(names):
        link = fleet.host_link(name) if fleet.device(name).type != "cpu" else None
        curve = link.curve if link else None
        if curve not in known:
            each = _seconds(curve, rows * values) if len(names) > 1 else np.zeros(rows.shape)
            known[curve] = (
                _seconds(curve, gradients),
                _seconds(curve, rows * gradients),
                each,
                each.sum(axis=0),
            )
        out, home, spread, all_of_them = known[curve]
        found[name] = Copies(out=out, home=home[i], spread=spread[i], into=all_of_them - spread[i])
    return found


def _seconds(curve: Curve | None, num_bytes: np.ndarray) -> np.ndarray:
    """`curve.seconds` of each, nothing of nothing."""
    if curve is None:
        return np.zeros(num_bytes.shape)
    sizes, which = np.unique(num_bytes, return_inverse=True)  # a model has many units, and few sizes of them
    seconds = np.array([curve.seconds(float(size)) if size else 0.0 for size in sizes])
    return seconds[which].reshape(num_bytes.shape)
