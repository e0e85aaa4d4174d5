"""What one operation takes on a device: as long as its FLOPs or its bytes need, whichever is longer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from evener.core.fleet import Device
from evener.errors import UsageError
from evener.rehearsal.counting import FORMULAS, bytes_moved, dtype_of, family_of


class Roofline:
    """Seconds of operations on `device`; FLOPs by torch's own formulas, remembered by shapes.

    A figure that the fleet file lacks drops its term; FLOPs in a dtype without a rate raise UsageError.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._factors = device.rehearsed.factors if device.rehearsed else {}
        self.launch_s = device.launch_s.value if device.launch_s else 0.0
        rate = device.bytes_per_s.value if device.bytes_per_s else float("inf")
        self._bytes_per_s = rate * self._factors.get("other", 1.0)
        self._known: dict[Any, float] = {}

    def seconds(
        self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any
    ) -> float:
        """max(flops / (rate[dtype] · factor[family]), bytes / (bandwidth · factor["other"])) + launch.

        Bytes are read plus written. Example: two 1,000 × 1,000 float32 matrices multiplied at 1 TFLOP/s, 100
        GB/s and 10 µs a launch take max(2e9 / 1e12, 12e6 / 100e9) = 2 ms, and 10 µs.
        """
        moved_s = bytes_moved(func, args, kwargs, out) / self._bytes_per_s
        formula = FORMULAS.get(func._overloadpacket)
        if formula is None:
            return moved_s + self.launch_s
        return max(self._computing_s(func, formula, args, kwargs, out), moved_s) + self.launch_s

    def _computing_s(
        self,
        func: torch._ops.OpOverload,
        formula: Callable[..., int],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        out: Any,
    ) -> float:
        key = (func, *map(_as_key, args))
        known = self._known.get(key)
        if known is not None:
            return known
        name = func._overloadpacket.__name__
        family, dtype = family_of(name), dtype_of(args)
        figure = self.device.flops.get(dtype)
        if figure is None and self.device.flops:
            raise UsageError(
                f"{self.device.name} cannot compute in {dtype}: the fleet file gives no rate for it",
                numbers=f"operation {name}; rates for: {', '.join(self.device.flops)}",
                remedy=f'add "{dtype}" to its flops, or train in a dtype it has',
            )
        rate = figure.value * self._factors.get(family, 1.0) if figure else float("inf")
        found = formula(*args, **kwargs, out_val=out) / rate
        self._known[key] = found
        return found


def _as_key(value: Any) -> Any:
    """What of an argument the FLOPs depend on, as part of a key."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_as_key, value))
    return value
