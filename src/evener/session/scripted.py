"""Scripted trouble in a real run: what a device's own process does when a fault of the script is due.

"at 40" strikes before the device's first action of step 40, "at 40.5" after half of its actions. A step that
is taken again is not struck again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from evener.core.actions import Action
from evener.core.faults import Fault, FaultScript
from evener.errors import UsageError
from evener.rehearsal.pacer import Pacer
from evener.session.request import Request
from evener.session.site import Site

Strike = Callable[[Fault], None]


class Scripted:
    """The faults of one device in the order in which they are due.

    `strikes` says by type what to do; UsageError at once for a type it does not know.
    """

    def __init__(self, script: FaultScript, here: str, strikes: Mapping[str, Strike]) -> None:
        self._waiting = [f for f in script.faults if here in (f.device, f.other)]
        self._strikes = strikes
        for fault in self._waiting:
            if fault.type not in strikes:
                raise UsageError(
                    f"the fault '{fault}' cannot be played in a run", remedy="evener simulate plays it"
                )

    def during(self, step: int, row: Sequence[Action]) -> Iterator[Action]:
        """The actions of `row`, striking when as much of the step is done as the script says."""
        for done, action in enumerate(row):
            while self._waiting and self._waiting[0].at_step <= step + done / len(row):
                fault = self._waiting.pop(0)
                self._strikes[fault.type](fault)
            yield action

    @property
    def waiting(self) -> tuple[Fault, ...]:
        """Those that were not due yet."""
        return tuple(self._waiting)


class OutOfMemoryOnce:
    """Lets the next forward of any of `modules` run out of memory, once each time it is armed."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._armed = ""
        self._hooks = [m.register_forward_pre_hook(lambda *_: self._fail()) for m in modules]

    def arm(self, fault: Fault) -> None:
        self._armed = str(fault)

    def _fail(self) -> None:
        armed, self._armed = self._armed, ""
        if armed:
            raise torch.OutOfMemoryError(f"scripted: {armed}")

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def scripted(request: Request, site: Site, modules: Iterable[nn.Module]) -> Scripted | None:
    """What is scripted for this device, None for nothing; noise begins now."""
    here = site.device.name
    if isinstance(site.driver, Pacer):
        own = site.device.rehearsed.noise if site.device.rehearsed else 0.0
        site.driver.disturb(own if request.noise is None else request.noise, f"{request.seed} {here}")
    strikes: dict[str, Strike] = {"slow": lambda fault: _slow(site, fault)}
    if any(f.type == "oom" and f.device == here for f in request.faults.faults):
        strikes["oom"] = OutOfMemoryOnce(modules).arm
    return Scripted(request.faults, here, strikes) if request.faults.faults else None


def _slow(site: Site, fault: Fault) -> None:
    assert isinstance(site.driver, Pacer) and fault.factor is not None, "asked for in a rehearsal only"
    site.driver.slow(fault.factor, fault.for_s)
