"""The few numbers that devices agree on once a step: loss, weight, metrics, health, seconds of computing.

One float64 vector, summed over devices. Sums come first, then one row of slots per device, so that the
sum is also a gathering:

    [ loss | weight | metric sums and counts … | device 0: health, lr, …, seconds … | device 1: … ]
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from evener.core.seams import Pending, Wire
from evener.core.trace import CAUSES
from evener.runtime.ranks import Ranks

HEALTHY, NON_FINITE, OUT_OF_MEMORY, ABANDONED = 0, 1, 2, 3
_FIRST_CAUSE = 6
_SLOTS = _FIRST_CAUSE + len(CAUSES)


@dataclass
class Share:
    """What this device puts into the tally of a step.

    `computed_s` is when it had done all of its part, `compute_s` what its forwards and backwards took,
    `samples` how many samples they held, counted anew in each of its stages. `notice` is the number of the
    newest change ahead that it knows of.
    """

    loss_sum: float = 0.0
    weight: float = 0.0
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    health: int = HEALTHY
    learning_rate: float = 0.0
    computed_s: float = 0.0
    compute_s: float = 0.0
    samples: int = 0
    notice: int = 0
    seconds_before: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Totals:
    """The tally of all devices together; dictionaries are keyed by device, `notice` is the largest of all.

    `values` is the summed vector that it was read from.
    """

    loss_sum: float
    weight: float
    metrics: dict[str, tuple[float, float]]
    health: dict[str, int]
    learning_rate: dict[str, float]
    computed_s: dict[str, float]
    compute_s: dict[str, float]
    samples: dict[str, int]
    notice: int
    seconds_before: dict[str, dict[str, float]]
    values: tuple[float, ...]

    @property
    def loss(self) -> float:
        """Mean loss over all weight of the step; 0 when the step holds no weight."""
        return self.loss_sum / self.weight if self.weight else 0.0


class Tally:
    """Sums and gathers the shares of all devices in one small reduction."""

    def __init__(self, ranks: Ranks, wire: Wire, metric_names: tuple[str, ...] = ()) -> None:
        self._ranks, self._wire, self._names = ranks, wire, metric_names

    def launch(self, step: int, share: Share) -> "_Underway":
        """Start the reduction of this device's share of `step`."""
        sums = [share.loss_sum, share.weight]
        for name in self._names:
            sums.extend(share.metrics.get(name, (0.0, 0.0)))
        slots = [float(share.health), share.learning_rate, share.computed_s, share.compute_s]
        slots += [float(share.samples), float(share.notice)]
        slots += [share.seconds_before.get(cause, 0.0) for cause in CAUSES]
        before = self._ranks.rank * _SLOTS
        after = self._ranks.world_size * _SLOTS - before - _SLOTS
        vector = torch.tensor(sums + [0.0] * before + slots + [0.0] * after, dtype=torch.float64)
        return _Underway(self._wire.all_reduce(vector, f"step {step}, tally"), vector, self)

    def read(self, values: Sequence[float]) -> Totals:
        """The totals in a summed vector."""
        num_sums = 2 + 2 * len(self._names)
        pairs = values[2:num_sums]
        rows = {
            device: values[num_sums + i * _SLOTS : num_sums + (i + 1) * _SLOTS]
            for i, device in enumerate(self._ranks.devices)
        }
        return Totals(
            loss_sum=values[0],
            weight=values[1],
            metrics={n: (pairs[2 * i], pairs[2 * i + 1]) for i, n in enumerate(self._names)},
            health={d: int(row[0]) for d, row in rows.items()},
            learning_rate={d: row[1] for d, row in rows.items()},
            computed_s={d: row[2] for d, row in rows.items()},
            compute_s={d: row[3] for d, row in rows.items()},
            samples={d: int(row[4]) for d, row in rows.items()},
            notice=max(int(row[5]) for row in rows.values()),
            seconds_before={d: dict(zip(CAUSES, row[_FIRST_CAUSE:], strict=True)) for d, row in rows.items()},
            values=tuple(values),
        )


class _Underway:
    def __init__(self, pending: Pending, vector: torch.Tensor, tally: Tally) -> None:
        self._pending, self._vector, self._tally = pending, vector, tally

    def wait(self) -> Totals:
        self._pending.wait()
        return self._tally.read(self._vector.tolist())
