"""Links of the fleet file: the sum is real, the moment it is there is computed.

Each member sends its clock at the launch beside the buffer; all members then compute the same end:

    member 0   launch ●                       start = max(launches, end of the reduction before)
    member 1        launch ●──────────● end   end   = start + all_reduce_seconds(bytes, hops)
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from evener.core.collectives import all_reduce_seconds, ring
from evener.core.figures import Curve
from evener.core.fleet import Fleet
from evener.core.seams import Pending, Wire
from evener.rehearsal.driver import PacedDriver


class PacedWire:
    """A `Wire` over `inner` that takes the seconds of `hops`, one curve a member of the group.

    All members launch the same reductions in the same order; one follows the other on the links. Messages of
    other groups on the same links are not seen.
    """

    def __init__(self, inner: Wire, driver: PacedDriver, member: int, hops: Sequence[Curve | None]) -> None:
        self._inner, self._driver = inner, driver
        self._member, self._hops = member, tuple(hops)
        self._under_way: deque[_PacedReduction] = deque()
        self._free_s = 0.0

    def all_reduce(self, buffer: Any, key: str) -> Pending:
        """Start summing `buffer` in place over all members; see `Wire.all_reduce` in `core/seams.py`."""
        launch_s = self._driver.launch()
        with self._driver.aside(), torch.no_grad():
            work = self._inner.all_reduce(buffer, key)
            launches = torch.zeros(len(self._hops), dtype=torch.float64)
            launches[self._member] = launch_s  # the others add their own: a sum of these is a gather
            stamp = self._inner.all_reduce(launches, f"{key}/clock")
        link_s = all_reduce_seconds(buffer.numel() * buffer.element_size(), self._hops)
        reduction = _PacedReduction(self, work, stamp, launches, link_s)
        self._under_way.append(reduction)
        return reduction

    def settle(self, reduction: "_PacedReduction") -> float:
        """The end of `reduction` on the devices' common clock; those launched before it are settled first."""
        while reduction.end_s is None:
            first = self._under_way.popleft()
            self._free_s = first.settle(self._free_s)
        return reduction.end_s

    def wait(self, reduction: "_PacedReduction", work: Pending) -> None:
        """Return when the real sum is there and the rehearsed links would have it too."""
        try:
            work.wait()
            end_s = self.settle(reduction)
        except BaseException:
            self._under_way.clear()  # a handle kept alive would keep the group's sockets open
            raise
        self._driver.advance(end_s)


class _PacedReduction:
    def __init__(
        self, wire: PacedWire, work: Pending, stamp: Pending, launches: torch.Tensor, link_s: float
    ) -> None:
        self.end_s: float | None = None
        self._wire = wire
        self._work: Pending | None = work
        self._stamp: Pending | None = stamp
        self._launches, self._link_s = launches, link_s

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            self._wire.wait(self, work)

    def settle(self, free_s: float) -> float:
        stamp, self._stamp = self._stamp, None
        if stamp is not None:
            stamp.wait()
        self.end_s = max(free_s, float(self._launches.max())) + self._link_s
        return self.end_s


def open_wire(inner: Wire, driver: PacedDriver, fleet: Fleet, devices: Sequence[str]) -> PacedWire:
    """The paced wire of `driver`'s device among `devices`, the group's names in the order of its members."""
    return PacedWire(inner, driver, list(devices).index(driver.device.name), ring(fleet, devices))
