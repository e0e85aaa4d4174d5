"""Predicted beside measured, per device and cause: where a prediction was wrong, and by how much."""

from collections.abc import Mapping

from evener.core.figures import Value
from evener.core.trace import CAUSES


class Difference(Value, frozen=True, kw_only=True):
    """Seconds of one device and cause in a step, predicted and measured."""

    device: str
    cause: str
    predicted_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        """Predicted less measured: positive where the prediction was too slow."""
        return self.predicted_s - self.measured_s

    @property
    def error(self) -> float | None:
        """Difference over measured, relative; absent where nothing was measured."""
        return self.difference_s / self.measured_s if self.measured_s > 0 else None


class Comparison(Value, frozen=True, kw_only=True):
    """All differences, devices in order of the measured ones and causes in order of CAUSES.

    `only_predicted` and `only_measured` name devices that have no partner to be compared with.
    """

    differences: tuple[Difference, ...]
    only_predicted: tuple[str, ...] = ()
    only_measured: tuple[str, ...] = ()

    @property
    def largest(self) -> Difference | None:
        """The difference of most seconds, either way: where to look first."""
        return max(self.differences, key=lambda d: abs(d.difference_s), default=None)


def compare(
    predicted: Mapping[str, Mapping[str, float]], measured: Mapping[str, Mapping[str, float]]
) -> Comparison:
    """The differences of two tables device → cause → seconds of a step; a cause that is absent took 0 s.

    Pairs that are 0 on both sides are left out. Example: {"lab/a": {"compute": 0.9}} against
    {"lab/a": {"compute": 1.0, "wait": 0.1}} differ by -0.1 s in compute (-10 %) and -0.1 s in wait.
    """
    differences = []
    for device in (name for name in measured if name in predicted):
        for cause in CAUSES:
            pair = predicted[device].get(cause, 0.0), measured[device].get(cause, 0.0)
            if any(pair):
                differences.append(
                    Difference(device=device, cause=cause, predicted_s=pair[0], measured_s=pair[1])
                )
    return Comparison(
        differences=tuple(differences),
        only_predicted=tuple(name for name in predicted if name not in measured),
        only_measured=tuple(name for name in measured if name not in predicted),
    )
