"""Links of the fleet file: the sum is real, the moment it is there is computed.

Members tell each other when, on their clocks, they launched; all then compute the same ends:

    member 0   launch ●                       start = max(launches, end of the reduction before)
    member 1        launch ●──────────● end   end   = start + all_reduce_seconds(bytes, hops)
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from evener.core.collectives import all_reduce_seconds, ring
from evener.core.exchange import Exchange
from evener.core.exchange_seconds import exchange_seconds
from evener.core.figures import Curve
from evener.core.fleet import Fleet
from evener.core.seams import Pending, Wire
from evener.rehearsal.pacer import Pacer

SMALL_BYTES = 4096
"""Up to so many bytes a sum is all latency and goes beside those under way, as over Gloo."""


class PacedWire:
    """A `Wire` over `inner` that takes the seconds of `hops`, one curve a member of the group.

    Or those that `seconds` gives for so many bytes, where the sum is no ring; clocks travel by `clocks`.

    All members launch the same reductions in the same order, and as many before they first wait: the clocks
    of all those travel in one small sum (one a reduction cost 40 % more on two busy cores). On the links one
    reduction follows the other; those of other groups on the same links are not seen.
    """

    def __init__(
        self,
        inner: Wire,
        driver: Pacer,
        member: int,
        hops: Sequence[Curve | None],
        *,
        seconds: Callable[[float], float] | None = None,
        clocks: Wire | None = None,
    ) -> None:
        self._inner, self._driver, self._clocks = inner, driver, clocks or inner
        self._member, self._hops = member, tuple(hops)
        self._seconds = seconds or (lambda num_bytes: all_reduce_seconds(num_bytes, self._hops))
        self._under_way: list[_PacedReduction] = []  # launched, and their ends not known yet
        self._free_s = 0.0

    def all_reduce(self, buffer: Any, key: str, *, exact_tail: int = 0) -> Pending:
        """Start summing `buffer` in place over all members; see `Wire.all_reduce` in `core/seams.py`."""
        launch_s = self._driver.launch()
        with self._driver.aside():
            work = self._inner.all_reduce(buffer, key, exact_tail=exact_tail)
        num_bytes = buffer.numel() * buffer.element_size()
        reduction = _PacedReduction(self, work, launch_s, self._seconds(num_bytes))
        reduction.goes_beside = num_bytes <= SMALL_BYTES
        self._under_way.append(reduction)
        return reduction

    def settle(self) -> None:
        """Learn when all members launched what is under way, and compute the ends."""
        settling, self._under_way = self._under_way, []
        launches = torch.zeros(len(settling), len(self._hops), dtype=torch.float64)
        # The others add their own column: a sum of these is a gather.
        launches[:, self._member] = torch.tensor([r.launch_s for r in settling], dtype=torch.float64)
        self._clocks.all_reduce(launches, "clocks").wait()
        for reduction, last_s in zip(settling, launches.max(1).values.tolist(), strict=True):
            if reduction.goes_beside:
                reduction.end_s = last_s + reduction.link_s
            else:
                self._free_s = reduction.end_s = max(self._free_s, last_s) + reduction.link_s

    def take(self, work: Pending) -> None:
        """The real sum arrives, which takes no time of the device."""
        with self._driver.aside():
            work.wait()

    def advance(self, end_s: float) -> None:
        """The device waits until `end_s`."""
        self._driver.advance(end_s)


class _PacedReduction:
    def __init__(self, wire: PacedWire, work: Pending, launch_s: float, link_s: float) -> None:
        self.launch_s, self.link_s = launch_s, link_s
        self.end_s: float | None = None
        self.goes_beside = False
        self._wire = wire
        self._work: Pending | None = work

    def wait(self) -> None:
        """Return when the real sum is there and the rehearsed links would have it too."""
        work, self._work = (
            self._work,
            None,
        )  # a handle kept alive after an error keeps the group's sockets open
        if work is None:
            return
        if self.end_s is None:
            self._wire.settle()
        self._wire.take(work)
        assert self.end_s is not None, "settled with all that were under way"
        self._wire.advance(self.end_s)


def open_wire(inner: Wire, driver: Pacer, fleet: Fleet, devices: Sequence[str]) -> PacedWire:
    """The paced wire of `driver`'s device among `devices`, the group's names in the order of its members."""
    return PacedWire(inner, driver, list(devices).index(driver.device.name), ring(fleet, devices))


def open_grouped_wire(
    inner: Wire, clocks: Wire, driver: Pacer, fleet: Fleet, devices: Sequence[str], exchange: Exchange
) -> PacedWire:
    """The paced wire over groups: `inner` sums as `exchange` says, `clocks` among `devices` as usual."""
    return PacedWire(
        inner,
        driver,
        list(devices).index(driver.device.name),
        (None,) * len(devices),
        seconds=lambda num_bytes: exchange_seconds(num_bytes, exchange, fleet),
        clocks=clocks,
    )
