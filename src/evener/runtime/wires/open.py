"""From what a plan says to a wire: its groups, made by all devices together, and this device's ends."""

from collections.abc import Callable, Sequence

import torch.distributed as dist

from evener.core.exchange import TRACKS, Exchange
from evener.runtime.wires.coding import codings_of
from evener.runtime.wires.grouped import GroupedWire
from evener.runtime.wires.inside import Alone, Inside, MessagesInside
from evener.runtime.wires.lane import LaneEnd
from evener.runtime.wires.messages import Messages
from evener.runtime.wires.shared import ROOMS, Memory, SharedInside, share_memory

NewGroup = Callable[[Sequence[str], str], dist.ProcessGroup]
"""(devices, backend) to their group; called by every device of the job, also by those not in it.

Devices are in the order of their processes: torch ranks a group in that order whatever it is given.
"""

ShareMemory = Callable[[dist.ProcessGroup, Sequence[str], int], Memory | None]


def open_grouped(
    exchange: Exchange,
    here: str,
    seed: int,
    new_group: NewGroup,
    *,
    summed: bool = False,
    share: ShareMemory = share_memory,
) -> GroupedWire:
    """The wire of device `here`. Called by all devices of the job together, with the same exchange.

    What is summed lies in host memory: groups go through the memory that their members share, where they do,
    else by messages over Gloo. `seed` is of what compression rounds by; every device adds its own place.
    `summed`: buffers already are their group's sum, the same on all of its members.
    On a device that is not in the exchange the wire sums nothing: it only made the groups with the others.
    PlanMismatchError and UsageError as the exchange has them.
    """
    notes: list[str] = []
    insides: list[Inside] = [Alone() for _ in range(TRACKS)]
    for members, transport in zip(exchange.groups, exchange.transports, strict=True):
        if len(members) == 1:
            continue
        owners = exchange.owners(members[0])
        ordered = [d for d in exchange.ordered if d in members]
        group = new_group(ordered, "gloo")
        if here not in members:
            continue
        memory = None if summed else share(group, ordered, 2 * ROOMS * TRACKS)
        if not summed and here == members[0]:
            told = ", ".join(members)
            if transport != "gloo":
                notes.append(f"{told} sum over hosts what lies in host memory, over gloo and not {transport}")
            if memory is None:
                notes.append(f"{told} share no memory: what they sum goes between them in messages")
        for track in range(TRACKS):
            there, back = _both(group, ordered, here, track)
            insides[track] = (
                SharedInside(memory, 2 * ROOMS * track, there, back, members, owners)
                if memory
                else MessagesInside(there, back, members, owners)
            )
    ends: list[dict[int, LaneEnd]] = [{} for _ in insides]
    place = exchange.devices.index(here) if here in exchange.devices else 0
    for number, lane in enumerate(exchange.lanes):
        if lane.part == 0:
            continue  # on every device alike
        ordered = [d for d in exchange.ordered if d in lane.devices]
        group = new_group(ordered, "gloo")
        if here in lane.devices:
            for track, found in enumerate(ends):
                codings = codings_of(lane, 2 * (TRACKS * (seed * 1009 + place) + track))
                found[number] = LaneEnd(lane, *_both(group, ordered, here, track), codings)
    if here not in exchange.devices:
        return GroupedWire(exchange, ())
    return GroupedWire(
        exchange, list(zip(insides, ends, strict=True)), collects=not summed, note="; ".join(notes)
    )


def _both(
    group: dist.ProcessGroup, devices: Sequence[str], here: str, track: int
) -> tuple[Messages, Messages]:
    """There and back over one group, told apart from each other and from other tracks by their tags."""
    there, back = (Messages(group, devices, here, 1 + 2 * track + way) for way in (0, 1))
    return there, back
