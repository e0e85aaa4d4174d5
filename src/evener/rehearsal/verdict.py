"""Can this machine rehearse that plan, and did it? Pure decisions, each with its sentence."""

from collections.abc import Sequence

import msgspec

from evener.core.figures import Value

MAX_LAG = 0.01  # behind its clock by more than this part of its time, a device's timings are void
MAX_LOAD = 0.4  # tried up to 0.44 of all cores; real models reach about half the rate of a large product
SCALED = '; it is far from keeping up: "scaled": {"slower": 1000} in the fleet file keeps the ratios'


class Lateness(Value, frozen=True, kw_only=True):
    """How well one device kept its clock.

    Of `actions`, paced for `total_s` seconds together, `late` ended past their deadline and further past it
    than the one before, by `late_s` seconds in all. A later action with time to spare catches up; `lag_s` is
    what nobody had caught up with after the last action: so much longer the run took than its clock says.
    `counted` actions ran for the first time and have no timing of their own; `guessed` reductions were
    launched where none was when their action was counted, and are taken as launched at its end; `pause_s`
    seconds passed outside actions and were added to the clock.
    """

    device: str
    actions: int = 0
    late: int = 0
    late_s: float = 0.0
    lag_s: float = 0.0
    total_s: float = 0.0
    counted: int = 0
    guessed: int = 0
    pause_s: float = 0.0

    @property
    def part(self) -> float:
        """Lag over paced seconds; 0 where nothing was paced."""
        return self.lag_s / self.total_s if self.total_s else 0.0

    def plus(self, **more: float) -> "Lateness":
        """The same with so much added to the fields named. Example: plus(actions=1, total_s=0.5)."""
        return msgspec.structs.replace(self, **{k: getattr(self, k) + v for k, v in more.items()})


def verdict(lateness: Sequence[Lateness]) -> tuple[bool, str]:
    """Do the timings hold, and why: no device may end more than 1 % behind its own clock.

    Delays that were caught up leave every deadline where it was, so only what remains makes timings void.
    Example: 0.5 s behind after 100 s of paced actions is 0.5 %: they hold.
    """
    worst = max(lateness, key=lambda x: (x.part, x.late_s), default=None)
    if worst is None or not any(x.actions for x in lateness):
        return True, "no action was paced: all timings are this machine's own"
    guessed = sum(x.guessed for x in lateness)
    note = f"; {guessed} reductions were taken as launched at the end of their action" if guessed else ""
    told = f"{worst.part:.2%}" if worst.part < 10 else f"{worst.part:.0f} times as long"
    story = (
        f"{worst.device} did worst: {worst.lag_s:.3f} s behind its clock after {worst.total_s:.2f} s ({told})"
    )
    if worst.late:
        story += (
            f"; {worst.late} of {worst.actions} actions ended late for themselves, by {worst.late_s:.3f} s "
            f"together, of which later ones caught up all but {worst.lag_s:.3f} s"
        )
    if worst.part > MAX_LAG:
        return (
            False,
            f"timings are void, this machine was too slow or too busy; {story}{note}"
            f"{SCALED if worst.part > 1 else ''}",
        )
    return True, f"timings hold; {story}{note}"


def foreseen(flops: float, step_s: float, machine_flops: float) -> str:
    """Why timings will be void where a step of `step_s` is to do `flops` FLOP; "" where they may hold.

    `machine_flops` is what all cores together reach in large matrix products, FLOP/s. Example: 18 GFLOP in
    9 ms are 2000 GFLOP/s; of 80 this machine has 0.4 to spare, 32: at least 63 times slower. What of a model
    is no product takes time as well, so that no sentence is no promise.
    """
    asked = flops / step_s
    if asked <= MAX_LOAD * machine_flops:
        return ""
    return (
        f"timings will be void: the plan has this machine compute {flops / 1e9:.3g} GFLOP in a step of "
        f"{step_s:.3g} s, {asked / 1e9:.3g} GFLOP/s, and its cores do {machine_flops / 1e9:.3g} in large "
        f"products, {MAX_LOAD:g} of that in a model; devices have to be slower, at least "
        f'{asked / machine_flops / MAX_LOAD:.2g} times ("scaled" in the fleet file keeps the ratios)'
    )
