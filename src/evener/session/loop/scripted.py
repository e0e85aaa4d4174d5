"""Scripted trouble in a real run: what a device's own process does when a fault of the script is due.

"at 40" strikes before the device's first action of step 40, "at 40.5" after half of its actions. A step that
is taken again is not struck again.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

from evener.core.actions import Action
from evener.core.faults import Fault
from evener.core.fleet import Device
from evener.errors import UsageError
from evener.rehearsal.pacer import Pacer
from evener.session.pulse import Pulse
from evener.session.request import Request
from evener.session.site import Site

Strike = Callable[[Fault], None]


class Scripted:
    """The faults of one device in the order in which they are due; `waiting` loses those that have struck.

    `strikes` says by type what to do; UsageError at once for a type it does not know.
    """

    def __init__(self, waiting: list[Fault], strikes: Mapping[str, Strike], end: Callable[[], None]) -> None:
        self._waiting, self._strikes, self._end = waiting, strikes, end
        for fault in waiting:
            if fault.type not in strikes:
                raise UsageError(
                    f"the fault '{fault}' cannot be played in a run", remedy="evener simulate plays it"
                )

    def during(self, step: int, row: Iterable[Action], num_actions: int) -> Iterator[Action]:
        """The actions of `row`, striking when as much of `num_actions` is done as the script says."""
        for done, action in enumerate(row):
            while self._waiting and self._waiting[0].at_step <= step + done / num_actions:
                fault = self._waiting.pop(0)
                self._strikes[fault.type](fault)
            yield action

    def close(self) -> None:
        """Leave nothing of it on the model."""
        self._end()


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


def begin_script(request: Request, site: Site) -> list[Fault]:
    """The faults that the request's script holds for this device; noise begins now."""
    here = site.device.name
    if isinstance(site.driver, Pacer):
        own = site.device.rehearsed.noise if site.device.rehearsed else 0.0
        site.driver.disturb(own if request.noise is None else request.noise, f"{request.seed} {here}")
    return [f for f in request.faults.faults if _strikes(f, site.device, request.fleet.devices[0])]


def _strikes(fault: Fault, here: Device, first: Device) -> bool:
    """Whether the fault is played by the process of `here`.

    A cut strikes the end that is not the job's first device, at which the store is: it is cut off from that.
    """
    if fault.type == "cut":
        near = {first.name, first.host}
        far = fault.device if fault.device not in near else fault.other
        return far in (here.name, here.host)
    return fault.type != "join" and fault.device == here.name


def scripted(
    waiting: list[Fault], site: Site, modules: Iterable[nn.Module], pulse: Pulse | None
) -> Scripted | None:
    """What strikes this device as it now is; None where nothing is left to."""
    if not waiting:
        return None
    memory = OutOfMemoryOnce(modules)
    strikes: dict[str, Strike] = {"slow": lambda fault: _slow(site, fault), "oom": memory.arm}
    if pulse is not None:
        strikes["leave"] = lambda fault: os.kill(os.getpid(), signal.SIGKILL)
        strikes["cut"] = lambda fault: _cut_off(pulse, fault)
    return Scripted(waiting, strikes, memory.close)


def _cut_off(pulse: Pulse, fault: Fault) -> None:
    """As behind a cut cable: sockets stay open, nothing comes and nothing goes, no sign of life either."""
    assert fault.for_s is not None
    pulse.hold(fault.for_s)
    time.sleep(fault.for_s)


def _slow(site: Site, fault: Fault) -> None:
    assert isinstance(site.driver, Pacer) and fault.factor is not None, "asked for in a rehearsal only"
    site.driver.slow(fault.factor, fault.for_s)
