"""Can this machine rehearse that fleet, and did it? Pure decisions, each with its sentence."""

from collections.abc import Mapping, Sequence

from evener.core.figures import Value
from evener.core.fleet import Device, Fleet

MAX_LATE = 0.01  # above this part of its time, a device's timings are void
MAX_LOAD = 0.4  # tried up to 0.44 of all cores; real models reach about half the rate of a large product
MAX_PER_CORE = 8


class Lateness(Value, frozen=True, kw_only=True):
    """How well one device kept its clock.

    `late` of `actions` ended later than their deadline by more than the one before, by `late_s` seconds in
    all, of `total_s` paced seconds. `counted` actions ran for the first time and have no timing; `guessed`
    reductions were launched where none was when their action was counted, and are taken as launched at its
    end; `pause_s` seconds passed outside actions and were added to the clock.
    """

    device: str
    actions: int = 0
    late: int = 0
    late_s: float = 0.0
    total_s: float = 0.0
    counted: int = 0
    guessed: int = 0
    pause_s: float = 0.0

    @property
    def part(self) -> float:
        """Late seconds over paced seconds; 0 where nothing was paced."""
        return self.late_s / self.total_s if self.total_s else 0.0


def verdict(lateness: Sequence[Lateness]) -> tuple[bool, str]:
    """Do the timings hold, and why. Example: 0.5 s late in 100 s of one device is 0.5 %, below 1 %: yes."""
    worst = max(lateness, key=lambda x: x.part, default=None)
    if worst is None or not any(x.actions for x in lateness):
        return True, "no action was paced: all timings are this machine's own"
    guessed = sum(x.guessed for x in lateness)
    note = f"; {guessed} reductions were taken as launched at the end of their action" if guessed else ""
    story = (
        f"{worst.device} lagged most: {worst.late} of {worst.actions} actions late by {worst.late_s:.4f} s "
        f"in {worst.total_s:.2f} s ({worst.part:.2%})"
    )
    if worst.part > MAX_LATE:
        return (
            False,
            f"timings are void, this machine was too slow or too busy; {story}{note}",
        )
    return True, f"timings hold; {story}{note}"


def check(fleet: Fleet, machine_flops: Mapping[str, float], num_cores: int) -> list[str]:
    """Sentences on why this machine is too slow to rehearse `fleet`; empty when it should do.

    `machine_flops` is what all cores together reach in large matrix products, FLOP/s by dtype. Example:
    8 + 4 + 2 + 2 GFLOP/s on 85 GFLOP/s is 0.19 of the machine, under the 0.4 that was tried: no sentence.
    """
    found = []
    for dtype in dict.fromkeys(d for device in fleet.devices for d in device.flops):
        asked = sum(_fastest(device, dtype) for device in fleet.devices)
        have = machine_flops.get(dtype)
        if have is None:
            found.append(f"nothing is known of this machine's rate in {dtype}, which the fleet has rates for")
        elif asked > MAX_LOAD * have:
            found.append(
                f"the devices do {asked / 1e9:.3g} GFLOP/s in {dtype} together, {asked / have:.2f} of this "
                f"machine's {have / 1e9:.3g}; above {MAX_LOAD} actions will end late, divide all rates by "
                f"{asked / have / MAX_LOAD:.2g} or more"
            )
    if len(fleet.devices) > MAX_PER_CORE * num_cores:
        found.append(
            f"{len(fleet.devices)} devices on {num_cores} cores: more than {MAX_PER_CORE} processes a core "
            "wait for each other"
        )
    return found


def _fastest(device: Device, dtype: str) -> float:
    if dtype not in device.flops:
        return 0.0
    factors = device.rehearsed.factors if device.rehearsed else {}
    return device.flops[dtype].value * max([1.0, *factors.values()])
