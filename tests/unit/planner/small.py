"""Small fleets and profiles for the planner's tests."""

from collections.abc import Mapping, Sequence

from evener.core.figures import Curve, Figure
from evener.core.fleet import Device, Fleet, Link
from evener.core.profile import Layer, Profile, StepTiming

GIB = 2.0**30


def figure(value: float, spread: float = 0.0) -> Figure:
    return Figure(value=value, source="measured", spread=spread)


def fleet_of(kinds: Sequence[str], *, memory: float | None = None, curve: Curve | None = None) -> Fleet:
    """Devices h/0, h/1, ... of these kinds on one host."""
    room = None if memory is None else figure(memory)
    devices = tuple(Device(name=f"h/{i}", kind=k, memory_bytes=room) for i, k in enumerate(kinds))
    return Fleet(devices=devices, links=(Link(a="h", b="h", curve=curve),) if curve else ())


def linear_profile(
    seconds_per_sample: Mapping[str, float],
    *,
    sizes: Sequence[int] = (1, 64),
    fixed_s: float = 0.0,
    update_s: float = 0.0,
    bytes_per_sample: float = 0.0,
    param_bytes: int = 0,
    spread: float = 0.0,
) -> Profile:
    """A third of the time is forward; one layer holds all parameters."""
    steps = [
        StepTiming(
            kind=kind,
            micro_batch=b,
            forward_s=figure((fixed_s + s * b) / 3, spread),
            backward_s=figure((fixed_s + s * b) * 2 / 3, spread),
            update_s=figure(update_s) if update_s else None,
            peak_bytes=figure(bytes_per_sample * b) if bytes_per_sample else None,
        )
        for kind, s in seconds_per_sample.items()
        for b in sizes
    ]
    layer = Layer(name="all", num_params=param_bytes // 4, param_bytes=param_bytes, flops_per_sample=1.0)
    return Profile(model="small", layers=(layer,), steps=tuple(steps), gradient_bytes=param_bytes)
