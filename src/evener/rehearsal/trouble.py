"""What disturbs a rehearsed device: spells in which it is slow, and actions that now and then take longer."""

import random

TAIL = 2.0
MOST = 30.0


class Trouble:
    """How many times its seconds a device's next action takes.

        factor = Π of the spells that hold · (1 + noise · min(u^(-1/2) - 1, 30)),   u uniform in (0, 1]

    The draw is Pareto's (Lomax) with index 2, cut off at 30: its mean is almost 1, so an action takes about
    1 + noise times as long, most of them little more than usual, and one in 120 more than 1 + 10 · noise.
    Drawn from a seed, action by action. Example: noise 0.5 and u = 0.04 give 1 + 0.5 · 4 = 3.
    """

    def __init__(self) -> None:
        self._spells: list[tuple[float, float]] = []  # (factor, end on the device's clock)
        self._noise = 0.0
        self._random = random.Random(0)

    def slow(self, factor: float, now_s: float, for_s: float | None) -> None:
        """Begin a spell of `factor` that ends `for_s` seconds after `now_s`, or never."""
        self._spells.append((factor, float("inf") if for_s is None else now_s + for_s))

    def disturb(self, noise: float, seed: str) -> None:
        """Begin to draw with `noise` from `seed`; 0 ends it."""
        self._noise, self._random = noise, random.Random(seed)

    def factor(self, now_s: float) -> float:
        """That of an action that begins at `now_s`; the next draw is used up."""
        factor = 1.0
        for times, end_s in self._spells:
            if now_s < end_s:
                factor *= times
        if self._noise:
            draw = min((1.0 - self._random.random()) ** (-1 / TAIL) - 1.0, MOST)
            factor *= 1.0 + self._noise * draw
        return factor
