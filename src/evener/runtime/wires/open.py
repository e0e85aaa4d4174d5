"""From what a plan says to a wire: its groups, made by all devices together, and this device's ends."""

from collections.abc import Callable, Sequence

import torch.distributed as dist

from evener.core.exchange import Exchange, Lane
from evener.runtime.compression.codec import Feedback, codec_of
from evener.runtime.wires.grouped import GroupedWire
from evener.runtime.wires.inside import Alone, CollectiveInside, Inside, MessagesInside
from evener.runtime.wires.lane import LaneEnd
from evener.runtime.wires.messages import Messages

NewGroup = Callable[[Sequence[str], str], dist.ProcessGroup]
"""(devices, backend) to their group; called by every device of the job, also by those not in it."""
# Both rounds of a lane and both ways inside a group go over one group, told apart by their tags.
_THERE, _BACK = 1, 2


def open_grouped(exchange: Exchange, here: str, seed: int, new_group: NewGroup) -> GroupedWire:
    """The wire of device `here`. Called by all devices of the job together, with the same exchange.

    A group whose transport is not Gloo goes by that backend's collectives. `seed` is of what compression
    rounds by; every device adds its own place. PlanMismatchError and UsageError as the exchange has them.
    """
    inside: Inside = Alone()
    for members, transport in zip(exchange.groups, exchange.transports, strict=True):
        if len(members) == 1:
            continue
        backend = transport or "gloo"
        owners = exchange.owners(members[0])
        if backend == "gloo":
            group = new_group(members, "gloo")
            if here in members:
                there, back = (Messages(group, members, here, tag) for tag in (_THERE, _BACK))
                inside = MessagesInside(there, back, members, owners)
        else:
            group, back_group = new_group(members, backend), new_group(members, backend)
            if here in members:
                inside = CollectiveInside(group, back_group, members, owners)
    ends = {}
    place = exchange.devices.index(here)
    for number, lane in enumerate(exchange.lanes):
        if lane.part == 0:
            continue  # on every device alike
        group = new_group(lane.devices, "gloo")
        if here in lane.devices:
            there, back = (Messages(group, lane.devices, here, tag) for tag in (_THERE, _BACK))
            ends[number] = LaneEnd(lane, there, back, _feedbacks(lane, 2 * (seed * 1009 + place)))
    return GroupedWire(exchange, inside, ends)


def _feedbacks(lane: Lane, seed: int) -> tuple[Feedback, Feedback] | None:
    """One for each round: a thread of its own uses it."""
    if lane.compression is None:
        return None
    first, second = (Feedback(codec_of(lane.compression, seed + i)) for i in (0, 1))
    return first, second
