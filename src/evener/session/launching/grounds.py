"""Where the processes of a job started here live: on this machine, or each host in a namespace of its own.

evener train ── store ──► in the namespace of the switches
             └─ device ─► in its host's namespace; messages between hosts cross shaped links
"""

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

from evener.core.addresses import host_and_port
from evener.core.fleet import Device, Fleet
from evener.core.tell import tell
from evener.core.words import counted
from evener.errors import EnvironmentBrokenError, UsageError
from evener.rehearsal.namespaces import Namespaces, missing
from evener.rehearsal.real_hosts import (
    INTERFACE,
    MEETING,
    SWITCHES,
    check_hosts,
    commands,
    delays,
    host_place,
    hosts_of,
    segments,
)
from evener.session.launched import world_size_here
from evener.session.request import Request

PLAIN = "--rehearse without --real-links, which paces links and needs none of this"
_OPEN_AT = "127.0.0.1:0"


class Grounds:
    """This machine as it is: the store listens at `host`, processes start where this one is."""

    takes_others = True  # whether devices may join from elsewhere

    def __init__(self, host: str) -> None:
        self.host = host

    def meeting(self) -> AbstractContextManager[None]:
        """Inside, the calling thread is where the job's store belongs."""
        return nullcontext()

    def place(self, device: Device) -> str:
        """The path of the namespace of a device's process; empty for where this process is."""
        return ""

    def variables(self) -> dict[str, str]:
        """What processes of devices find in their environment."""
        return {}


class RealGrounds(Grounds):
    """Hosts as namespaces with shaped links."""

    takes_others = False

    def __init__(self, namespaces: Namespaces) -> None:
        super().__init__(MEETING)
        self._namespaces = namespaces

    def meeting(self) -> AbstractContextManager[None]:
        return self._namespaces.inside(SWITCHES)

    def place(self, device: Device) -> str:
        return self._namespaces.path(host_place(device.host))

    def variables(self) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": INTERFACE}


@contextlib.contextmanager
def grounds_of(request: Request) -> Iterator[Grounds]:
    """Where the processes of `request` live, while the context lasts; nothing is left of it afterwards.

    UsageError and EnvironmentBrokenError as in `check_real_links`.
    """
    if not request.real_links:
        yield Grounds(host_and_port(request.open_at)[0])
        return
    check_real_links(request)
    fleet = request.fleet
    with Namespaces([SWITCHES, *(host_place(h) for h in hosts_of(fleet))]) as namespaces:
        for wanted in commands(fleet):
            namespaces.run(wanted)
        refused = _delayed(namespaces, fleet)
        if not request.quiet:
            joined = counted(len(segments(fleet)), "shaped link")
            tell(f"real links: {counted(len(hosts_of(fleet)), 'host')} are namespaces, joined by {joined}")
        if refused:
            tell(refused)
        yield RealGrounds(namespaces)


def check_real_links(request: Request) -> None:
    """UsageError where a request's hosts cannot be namespaces, EnvironmentBrokenError where this machine
    cannot make them.
    """
    wrong = ""
    if not request.rehearse:
        wrong = "--real-links joins the hosts of a fleet file, and nothing is rehearsed"
    elif world_size_here() is not None:
        wrong = "--real-links starts its processes in namespaces, and torchrun has started them already"
    elif request.open_at != _OPEN_AT:
        wrong = "--open-at lets devices join from elsewhere, and from there no namespace is reached"
    if wrong:
        raise UsageError(wrong, remedy="evener train SCRIPT --rehearse FLEET.json --real-links")
    check_hosts(request.fleet)
    lacks = missing()
    if lacks:
        raise EnvironmentBrokenError(
            f"--real-links makes network namespaces with shaped links, which needs {lacks}",
            numbers=f"user id {os.geteuid()}" if hasattr(os, "geteuid") else "",
            remedy=PLAIN,
        )


def _delayed(namespaces: Namespaces, fleet: Fleet) -> str:
    """Give links their latency; a sentence where this kernel cannot."""
    try:
        for wanted in delays(fleet):
            namespaces.run(wanted)
    except EnvironmentBrokenError as e:
        most_s = max(x.curve.points[0][1] for x in segments(fleet))
        return (
            f"links have their rates, not their latencies of up to {1e3 * most_s:.3g} ms: this kernel has "
            f"no netem ({e.what.rpartition('failed: ')[2]})"
        )
    return ""
