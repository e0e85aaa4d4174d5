"""What is believed of each device's speed: a factor on the profile's seconds, changed only on evidence.

    observed   1.02 0.97 1.01 | 3.1  3.0 | 2.9 3.1 …        two in a row beyond the band of two:
    believed   1    1    1    | 1    3.0 | 3.0 3.0 …        believed after the second

Three rules look at the newest 2, 9 and 33 observations since the belief last changed. The more there are, the
smaller the difference they can tell from noise, so a jump is believed at once and a drift in time.
"""

from collections.abc import Mapping
from itertools import pairwise
from statistics import median

from msgspec.structs import replace

from evener.core.figures import Value

MEMORY = 33
FEW, MANY = 5, 17  # observations that say something of their spread, and those that say enough
RULES = ((2, 0.20, 4.0), (9, 0.11, 2.8), (MEMORY, 0.06, 1.5))
"""(observations, least band, band in spreads).

The spread is the median difference between one observation and the next, which a jump does not widen; it is
0.95 σ where the noise is normal. A median of n observations scatters by 1.25 σ / √n: bands of 2.8 spreads for
9 and 1.5 for 33 are more than six such deviations. The least bands keep noise of ± 5 % out: two figures
inside it differ by up to 1.05 / 0.95 = 11 %.
"""


class Pace(Value, frozen=True, kw_only=True):
    """One device: the factor believed, and the observations since it last changed, the newest last.

    `spread` is the part of the factor by which one step differed from the next before that change.
    """

    factor: float = 1.0
    recent: tuple[float, ...] = ()
    spread: float = 0.0


def observed(pace: Pace, factor: float) -> Pace:
    """The belief after one more step in which the device took `factor` times the profile's seconds.

    Changed where one of `RULES` says so: the newest two are both beyond the belief by more than the band, on
    one side (the nearer is then believed), or the median of the newest 9 or 33 is. Bands grow with the spread
    of what was seen. Example: believed 1 and seen 1.02, 3.1, the belief stays 1; after another 3.0 it is 3.0.
    """
    recent = (*pace.recent, factor)[-MEMORY:]
    spread = _spread(recent, pace.factor)
    if len(recent) < MANY:
        spread = max(pace.spread, spread)
    for count, least, in_spreads in RULES:
        if len(recent) < count:
            break
        newest = recent[-count:]
        high = pace.factor * (1 + max(least, in_spreads * spread))
        low = pace.factor**2 / high
        if count == 2:
            value = min(newest, key=lambda seen: abs(seen - pace.factor))
            moved = min(newest) > high or max(newest) < low
        else:
            value = median(newest)
            moved = not low <= value <= high
        if moved:
            return Pace(factor=value, recent=newest if count > 2 else newest[-1:], spread=spread)
    return replace(pace, recent=recent)


def _spread(seen: tuple[float, ...], factor: float) -> float:
    """The median difference between one and the next, as a part of the factor; 0 for too few to say."""
    if len(seen) < FEW:
        return 0.0
    return median(abs(b - a) for a, b in pairwise(seen)) / factor


class Estimates(Value, frozen=True, kw_only=True):
    """The paces of all devices by name; one that is not named is believed to keep to the profile."""

    paces: dict[str, Pace] = {}

    def factor(self, device: str) -> float:
        """Seconds of `device` over the profile's."""
        pace = self.paces.get(device)
        return pace.factor if pace else 1.0

    @property
    def factors(self) -> dict[str, float]:
        """By device, the factors that are not 1."""
        return {name: pace.factor for name, pace in self.paces.items() if pace.factor != 1.0}


def updated(estimates: Estimates, seen: Mapping[str, float]) -> tuple[Estimates, tuple[str, ...]]:
    """The estimates after a step in which each device of `seen` took so many times the profile's seconds, and
    the devices of which something else is believed now.

    Only sums, products and comparisons of the same numbers in the same order: every device of a job that is
    told the same `seen` comes to the same belief, bit for bit.
    """
    paces = dict(estimates.paces)
    changed = []
    for device, factor in seen.items():
        before = paces.get(device, Pace())
        paces[device] = after = observed(before, factor)
        if after.factor != before.factor:
            changed.append(device)
    return Estimates(paces=paces), tuple(changed)
