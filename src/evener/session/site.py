"""One process's place in the job: its device, opened, and the driver and wire that stand before it."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from evener.core.exchange import Exchange
from evener.core.fleet import REHEARSED, Device, Fleet
from evener.core.residence import host_bytes_per_s, host_disk
from evener.core.seams import Channel, Driver, Wire
from evener.errors import UsageError
from evener.rehearsal.channel import PacedChannel, SharedLines
from evener.rehearsal.driver import open_driver
from evener.rehearsal.pacer import Pacer
from evener.rehearsal.real import open_real_grouped_wire, open_real_wire, paced_with_real_links
from evener.rehearsal.real_hosts import hosts_of, inside_hosts
from evener.rehearsal.verdict import Lateness
from evener.rehearsal.wire import open_grouped_wire, open_wire
from evener.runtime.channels.channel import open_channel
from evener.runtime.hardware import HardwareDriver, open_torch_device
from evener.runtime.outer.between import Between
from evener.runtime.ranks import Ranks
from evener.runtime.wire import GroupWire, SoloWire, StagedWire
from evener.runtime.wires.grouped import GroupedWire
from evener.runtime.wires.open import NewGroup, open_grouped
from evener.session.address import address_here
from evener.session.request import Request

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch's allocator reads its settings: the name of today, and the one before."""
# What each kind of accelerator talks with among its own; anything else goes over Gloo through host memory.
_FAST_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}


@dataclass(frozen=True)
class Site:
    """A device of the fleet as this process drives it; `notes` say what was set for it, and why.

    With `real_links` what a rehearsal sends between hosts takes the time it really takes.
    """

    device: Device
    torch_device: torch.device
    driver: Driver
    notes: tuple[str, ...] = ()
    real_links: bool = False

    def with_real_links(self) -> "Site":
        """The same, with links between hosts that are real."""
        return replace(self, real_links=True)

    def wire(
        self,
        fleet: Fleet,
        used: tuple[str, ...],
        *,
        rehearse: bool,
        group: dist.ProcessGroup | None = None,
    ) -> Wire:
        """The wire among the devices `used` over `group`; None is the group that was joined.

        Called by all of them together: accelerators whose own library sums connect in here.
        """
        if len(used) == 1:
            return SoloWire()
        plain: Wire = GroupWire(group)
        if self.torch_device.type != "cpu":
            if backend_of(fleet, used) == "gloo":
                plain = StagedWire(plain)
            elif self.device.name in used:  # who is not only made the group with them
                # Such a library connects a group in its first sum, and waits there for all members. In a step
                # each device comes to its groups in an order of its own: a ring of them would wait for ever.
                first = torch.zeros(1, device=self.torch_device)
                plain.all_reduce(first, f"a first number among {', '.join(used)}").wait()
        if not rehearse:
            return plain
        assert isinstance(self.driver, Pacer)
        if self._is_real(fleet, used):
            return open_real_wire(plain, self.driver, inside_hosts(fleet), used)
        return open_wire(plain, self.driver, fleet, used)

    def around(
        self,
        grouped: GroupedWire,
        fleet: Fleet,
        used: tuple[str, ...],
        *,
        rehearse: bool,
        group: dist.ProcessGroup | None = None,
    ) -> Wire:
        """`grouped` as this device uses it among `used`; a rehearsal's clocks travel over `group`."""
        wire: Wire = grouped
        grouped.is_timed = not rehearse  # what a rehearsal's links take is not what this machine's do
        if self.torch_device.type != "cpu":
            wire = StagedWire(wire)
        if not rehearse:
            return wire
        assert isinstance(self.driver, Pacer)
        if self._is_real(fleet, used):
            return open_real_grouped_wire(wire, self.driver, inside_hosts(fleet), grouped.exchange)
        return open_grouped_wire(wire, GroupWire(group), self.driver, fleet, used, grouped.exchange)

    def between(
        self,
        fleet: Fleet,
        used: tuple[str, ...],
        exchange: Exchange,
        seed: int,
        new_group: NewGroup,
        *,
        rehearse: bool,
    ) -> Between:
        """What sums over groups what is in host memory and the same on all members of a group."""
        grouped = open_grouped(exchange, self.device.name, seed, new_group, summed=True)
        wire: Wire = grouped
        if rehearse:
            assert isinstance(self.driver, Pacer)
            if self._is_real(fleet, used):
                wire = open_real_grouped_wire(grouped, self.driver, inside_hosts(fleet), exchange)
            else:
                wire = open_grouped_wire(grouped, GroupWire(), self.driver, fleet, used, exchange)
        return Between(wire, grouped if exchange.loses else None)

    def channel(self, fleet: Fleet, ranks: Ranks, store: dist.Store, *, rehearse: bool) -> Channel:
        """The channel to the other devices of the job, for what crosses the cuts of a pipeline."""
        host = address_here(os.environ)
        plain = open_channel(ranks, dist.PrefixStore("channels", store), host=host)
        if not rehearse:
            return plain
        assert isinstance(self.driver, Pacer)
        lines = SharedLines(dist.PrefixStore("lines", store))
        if self.real_links:
            return paced_with_real_links(plain, self.driver, inside_hosts(fleet), lines)
        return PacedChannel(plain, self.driver, fleet, lines)

    def _is_real(self, fleet: Fleet, used: tuple[str, ...]) -> bool:
        """Whether sums among `used` cross real links."""
        return self.real_links and len(hosts_of(fleet.only(used))) > 1

    @property
    def lateness(self) -> Lateness | None:
        """How well a rehearsal kept its clock; None on real hardware."""
        return self.driver.lateness() if isinstance(self.driver, Pacer) else None


def site_of(request: Request, rank: int) -> Site:
    """The device of process `rank`, opened in here as `request` asks.

    Comparing gradients with a plan that is given asks nothing about time, in dtypes that have no rate.
    """
    timed = request.plan is None or not request.keep_gradient
    device = request.fleet.devices[rank]
    site = open_site(device, rehearse=request.rehearse, fleet=request.fleet, timed=timed)
    return site.with_real_links() if request.real_links else site


def open_site(device: Device, *, rehearse: bool, fleet: Fleet | None = None, timed: bool = True) -> Site:
    """Open `device` in this process.

    A rehearsed CPU computes on one thread of this machine's CPU, a rehearsed accelerator is the device
    `rehearsal:0`, with the link to its host that `fleet` names. With `timed` false an accelerator is only
    rehearsed in what lies where, and nothing takes time.
    """
    if rehearse and device.type == "cpu":
        return Site(device, open_torch_device("cpu", None, 1), open_driver(device))
    if rehearse:
        return _open_card(device, fleet, timed=timed)
    if device.type == REHEARSED:
        raise UsageError(
            f"{device.name} is a rehearsed accelerator: no machine has one",
            remedy="--rehearse with its fleet file",
        )
    settings, why = allocator_settings(device.type, os.environ, nvidia=torch.version.cuda is not None)
    os.environ.update(settings)  # read when the allocator is first asked for memory
    torch_device = open_torch_device(device.type, device.index, device.threads)
    return Site(device, torch_device, HardwareDriver(torch_device), (why,) if why else ())


def allocator_settings(
    type_: str, environment: Mapping[str, str], *, nvidia: bool, system: str = sys.platform
) -> tuple[dict[str, str], str]:
    """(settings of torch's allocator for a device of `type_`, as environment variables; the reason).

    Expandable segments: one segment that grows instead of many of fixed sizes, so that a micro-batch of
    another length, or after a change of shares, finds room where freed blocks lie. NVIDIA's driver alone has
    what they need, and torch's allocator does it on Linux; a split size is left alone, as it makes no
    difference within them. What the user has set stays. Example: ("cuda", {}, nvidia=True) on Linux gives
    PYTORCH_ALLOC_CONF=expandable_segments:True.
    """
    given = [name for name in ALLOCATOR_VARIABLES if environment.get(name)]
    if type_ != "cuda" or not nvidia or system != "linux":
        return {}, ""
    if given:
        return {}, f"the allocator keeps the settings that were given in {given[0]}"
    return {ALLOCATOR_VARIABLES[0]: "expandable_segments:True"}, (
        f"{ALLOCATOR_VARIABLES[0]}=expandable_segments:True was set: segments that grow leave no rests "
        "when micro-batches change their size"
    )


def expandable_segments(environment: Mapping[str, str]) -> bool:
    """Whether the settings of torch's allocator ask for expandable segments, which a rehearsal has as well.

    Example: {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} does.
    """
    settings = (environment.get(name, "") for name in ALLOCATOR_VARIABLES)
    return any("expandable_segments:true" in s.replace(" ", "").lower() for s in settings)


def _open_card(device: Device, fleet: Fleet | None, *, timed: bool) -> Site:
    from evener.rehearsal.device.backend import open_card  # registers with torch: only where it is wanted
    from evener.rehearsal.device.clock import Clock
    from evener.rehearsal.device.driver import CardDriver

    torch.set_num_threads(1)
    link = fleet.host_link(device.name) if fleet else None
    card = open_card(
        device,
        link.curve if link else None,
        clock=Clock(host_counts=False),
        expandable=expandable_segments(os.environ),
        timed=timed,
    )
    rate = host_bytes_per_s(fleet, device.name) if fleet else None
    disk = host_disk(fleet, device.name) if fleet else None
    driver = CardDriver(card, host_bytes_per_s=rate.value if rate else None, disk=disk)
    return Site(device, card.torch_device, driver)


def backend_of(fleet: Fleet, used: tuple[str, ...]) -> str:
    """The torch.distributed backend that reaches all of `used`.

    Accelerators of one vendor talk over their own backend, and the few host numbers of a step over Gloo;
    as soon as vendors or CPUs mix, everything goes over Gloo.
    """
    types = {fleet.device(name).type for name in used}
    (first, *others) = types
    if not others and first in _FAST_BACKENDS:
        return f"cpu:gloo,{first}:{_FAST_BACKENDS[first]}"
    return "gloo"
