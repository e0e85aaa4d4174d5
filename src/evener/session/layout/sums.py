"""The wires that sum a plan's gradients: one for each set of devices that hold the same layers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from evener.core.buckets import BUCKET_BYTES
from evener.core.exchange import exchange_of, reductions_of
from evener.core.fleet import Fleet
from evener.core.seams import Wire
from evener.policy.slow_links import LinkWatch
from evener.runtime.wires.grouped import GroupedWire
from evener.runtime.wires.open import open_grouped
from evener.session.layout.seat import Seat

_APART = 1_000_003  # seeds of one set's rounding from those of the next


@dataclass(frozen=True, kw_only=True)
class GradientWires:
    """This device's wire for each set it is in, and those of them that go over groups."""

    among: dict[tuple[str, ...], Wire]
    grouped: tuple[GroupedWire, ...]


def gradient_wires(seat: Seat, sets: Iterable[tuple[str, ...]]) -> GradientWires:
    """The wires for `sets`, as the plan's reductions say of each, else one ring.

    Called by all devices of the plan together with the same sets: each makes all process groups in one order,
    those it is not in as well.
    """
    ranks, among = seat.ranks, dict[tuple[str, ...], Wire]()
    found: list[GroupedWire] = []
    for number, devices in enumerate(dict.fromkeys(sets)):
        group = seat.new_group(devices) if 1 < len(devices) < ranks.world_size else None
        ordered = [d for d in ranks.devices if d in devices]
        exchange = exchange_of(reductions_of(seat.plan, devices), ordered)
        rounding = seat.seed + _APART * number
        grouped = None
        if exchange:  # whose values `Site.around` brings to the host
            grouped = open_grouped(exchange, ranks.here, rounding, seat.new_group)
        if ranks.here not in devices:
            continue
        if grouped is None:
            among[devices] = seat.wire(devices, group)
        else:
            found.append(grouped)
            among[devices] = seat.site.around(
                grouped, seat.fleet, devices, rehearse=seat.rehearse, group=group
            )
    return GradientWires(among=among, grouped=tuple(found))


def link_watch(
    fleet: Fleet,
    grouped: Sequence[GroupedWire],
    parameters: Mapping[str, nn.Parameter],
    compress: Sequence[str],
) -> LinkWatch:
    """The watch over this device's links; sums are priced as those of its largest group of devices."""
    whole = sum(p.nbytes for p in parameters.values() if p.requires_grad)
    buffers = [float(BUCKET_BYTES)] * (whole // BUCKET_BYTES) + [float(whole % BUCKET_BYTES)]
    devices = max((wire.exchange.ordered for wire in grouped), key=len)
    return LinkWatch(fleet=fleet, devices=devices, buffers=[b for b in buffers if b], compress=compress)
