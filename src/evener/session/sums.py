"""The wires that sum a plan's gradients: one for each set of devices that hold the same layers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from evener.core.exchange import exchange_of, reductions_of
from evener.core.fleet import Fleet
from evener.core.plan import Plan
from evener.core.seams import Wire
from evener.runtime.ranks import Ranks
from evener.runtime.wires.grouped import GroupedWire
from evener.runtime.wires.open import open_grouped
from evener.session.meeting import Meeting
from evener.session.site import Site

_APART = 1_000_003  # seeds of one set's rounding from those of the next


@dataclass(frozen=True, kw_only=True)
class GradientWires:
    """This device's wire for each set it is in, and those of them that go over groups."""

    among: dict[tuple[str, ...], Wire]
    grouped: tuple[GroupedWire, ...]


def gradient_wires(
    plan: Plan,
    ranks: Ranks,
    site: Site,
    fleet: Fleet,
    meeting: Meeting,
    sets: Iterable[tuple[str, ...]],
    *,
    rehearse: bool,
    seed: int,
) -> GradientWires:
    """The wires for `sets`, as the plan's reductions say of each, else one ring.

    Called by all devices of the plan together with the same sets: each makes all process groups in one order,
    those it is not in as well.
    """

    def new_group(devices: Sequence[str], backend: str | None = None) -> dist.ProcessGroup:
        return meeting.new_group([ranks.devices.index(d) for d in devices], backend)

    among: dict[tuple[str, ...], Wire] = {}
    found: list[GroupedWire] = []
    for number, devices in enumerate(dict.fromkeys(sets)):
        group = new_group(devices) if 1 < len(devices) < ranks.world_size else None
        ranked = [d for d in ranks.devices if d in devices]
        exchange = exchange_of(reductions_of(plan, devices), ranked)
        grouped = open_grouped(exchange, ranks.here, seed + _APART * number, new_group) if exchange else None
        if ranks.here not in devices:
            continue
        if grouped is None:
            among[devices] = site.wire(fleet, devices, rehearse=rehearse, group=group)
        else:
            found.append(grouped)
            among[devices] = site.around(grouped, fleet, devices, rehearse=rehearse, group=group)
    return GradientWires(among=among, grouped=tuple(found))
