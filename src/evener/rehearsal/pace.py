"""Work → seconds on a device of a fleet file. Pure: the same work takes the same time, always."""

from evener.core.fleet import Device
from evener.errors import UsageError
from evener.rehearsal.counting import Work


def seconds(work: Work, device: Device) -> float:
    """Seconds that `device` needs for `work`; 0 where the fleet file gives nothing to go by.

        launch_s · operations
        + Σ FLOPs / (flops[dtype] · factors[family])
        + bytes / (bytes_per_s · factors["other"])

    A figure that is absent drops its term, but FLOPs in a dtype without a rate raise UsageError. Example:
    8e6 FLOPs of matmul at 8 GFLOP/s · 0.5 and 10 operations of 20 µs each take 2 ms + 0.2 ms = 2.2 ms.
    """
    factors = device.rehearsed.factors if device.rehearsed else {}
    total = work.num_ops * device.launch_s.value if device.launch_s else 0.0
    if device.bytes_per_s:
        total += work.num_bytes / (device.bytes_per_s.value * factors.get("other", 1.0))
    for (family, dtype), flops in work.flops.items():
        if dtype not in device.flops:
            raise UsageError(
                f"{device.name} cannot compute in {dtype}: the fleet file gives no rate for it",
                numbers=f"{flops:.3g} FLOPs of {family}; rates for: {', '.join(device.flops) or 'no dtype'}",
                remedy=f'add "{dtype}" to its flops, or train in a dtype it has',
            )
        total += flops / (device.flops[dtype].value * factors.get(family, 1.0))
    return total
