"""A clock that moves when it is read, slept on or told to; a device whose actions take round numbers."""

from collections.abc import Callable

import torch

from evener.core.figures import Figure
from evener.core.fleet import Device
from evener.rehearsal.driver import PacedDriver

DEVICE = Device(name="a/x", kind="k", flops={"float32": Figure(value=1e9, source="assumed")})
_X = torch.ones(100, 100)
PRODUCT_S = 2e-3  # of _X @ _X on DEVICE


class FakeClock:
    """Every reading takes a microsecond, so that spinning ends; sleep may overshoot."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.slept: list[float] = []
        self.overshoot_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-6
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds + self.overshoot_s


def open_fake() -> tuple[PacedDriver, FakeClock]:
    clock = FakeClock()
    return PacedDriver(DEVICE, clock, clock.sleep), clock


def products(num: int, clock: FakeClock, real_s: float = 0.0) -> Callable[[], str]:
    """Work of `num` matrix products that takes this machine `real_s` seconds."""

    def work() -> str:
        for _ in range(num):
            torch.mm(_X, _X)
        clock.now_s += real_s
        return "done"

    return work
