"""A device that takes a multiple of its kind's seconds: a kind of its own, beside the measured ones."""

from msgspec.structs import replace

from evener.core.figures import Figure
from evener.core.fleet import Fleet
from evener.core.profile import Profile, StepTiming, Timing


def slowed(fleet: Fleet, profile: Profile, name: str, factor: float) -> tuple[Fleet, Profile]:
    """The fleet in which device `name` has a kind with `factor` times the seconds, and the profile with that
    kind.

    Its rates fall by as much. UnknownNameError for a device the fleet does not hold. Example: factor 2 makes
    a forward of 3 ms at micro-batch 4 one of 6 ms on "KIND (2 times slower)".
    """
    device = fleet.device(name)
    kind = f"{device.kind} ({factor:.6g} times slower)"

    def timing(row: Timing) -> Timing:
        keys = ("forward_s", "backward_s", "update_s")
        return replace(row, kind=kind, **{k: times(getattr(row, k), factor) for k in keys})

    def step(row: StepTiming) -> StepTiming:
        keys = ("forward_s", "backward_s", "update_s", "input_s", "step_overhead_s", "rows_s")
        return replace(row, kind=kind, **{k: times(getattr(row, k), factor) for k in keys})

    if kind not in profile.kinds:
        profile = replace(
            profile,
            timings=(*profile.timings, *(timing(t) for t in profile.timings if t.kind == device.kind)),
            steps=(*profile.steps, *(step(s) for s in profile.steps if s.kind == device.kind)),
        )
    slower = replace(
        device,
        kind=kind,
        flops={t: replace(f, value=f.value / factor) for t, f in device.flops.items()},
        bytes_per_s=times(device.bytes_per_s, 1 / factor),
        launch_s=times(device.launch_s, factor),
    )
    devices = tuple(slower if d.name == name else d for d in fleet.devices)
    return replace(fleet, devices=devices), profile


def times(figure: Figure | None, factor: float) -> Figure | None:
    """The figure multiplied; None stays None."""
    return None if figure is None else replace(figure, value=figure.value * factor)
