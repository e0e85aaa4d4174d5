"""Devices to rehearse in tests, and opening one in a process of its own."""

from typing import Any

from evener.core.figures import Curve, Figure, line
from evener.core.fleet import Device


def figure(value: float) -> Figure:
    return Figure(value=value, source="assumed")


def card_of(
    *,
    flops: float = 1e15,
    bytes_per_s: float = 1e15,
    launch_s: float = 0.0,
    memory: float | None = None,
    link: Curve | None = None,
    **more: Any,
) -> Any:
    """Open a device in this process: so fast that nothing waits, unless told otherwise."""
    from evener.rehearsal.device.backend import open_card

    device = Device(
        name="lab/gpu0",
        kind="rehearsed",
        type="cuda",
        flops=dict.fromkeys(("float32", "float64", "bfloat16", "float16"), figure(flops)),
        bytes_per_s=figure(bytes_per_s),
        launch_s=figure(launch_s) if launch_s else None,
        memory_bytes=figure(memory) if memory else None,
    )
    return open_card(device, link, **more)


def pcie(gb_per_s: float = 12.0) -> Curve:
    return line(1e-5, gb_per_s * 1e9, source="assumed")
