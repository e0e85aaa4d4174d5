"""How long a sum over groups takes: one formula for the cost model and for the paced wire.

piece 0   collect | scatter | gather | spread
piece 1             collect | scatter | gather | spread        seconds = first piece + (k - 1) · slowest
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from evener.core.exchange import LOSSLESS, PIECE_BYTES, TRACKS, Exchange, Lane, goes_round
from evener.core.figures import Curve
from evener.core.fleet import Fleet, Link

VALUE_BYTES = 4
HOST_BYTES_PER_S = 8e9
"""Memory bandwidth of a device that names none (assumed: one core of a desktop)."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """What a compression makes of a float32: bytes on the wire, and bytes of memory touched on the way.

    `there` is to compress and keep the error, `back` to unpack; both from timings on a CPU, see docs/log.md.
    With `columns` the bytes are those of so many columns and rows of a nearly square matrix.
    """

    ratio: float = 1.0
    columns: int = 0
    there: float = 0.0
    back: float = 0.0

    def on_wire(self, num_bytes: float) -> float:
        """Bytes that stand for `num_bytes` of float32. Example: 1 MB by 4 columns: 2 · 4 · 4 · √250,000."""
        if not self.columns:
            return self.ratio * num_bytes
        return min(num_bytes, 2 * self.columns * VALUE_BYTES * (num_bytes / VALUE_BYTES) ** 0.5)


PLAIN = Packing(there=8.0, back=7.0)
PACKINGS = {
    "bf16": Packing(ratio=0.5, there=9.0, back=10.0),
    "fp16": Packing(ratio=0.5, there=21.0, back=10.0),
    "int8": Packing(ratio=0.254, there=49.0, back=11.0),
    "int4": Packing(ratio=0.1406, there=79.0, back=23.0),
    "top1%": Packing(ratio=0.02, there=119.0, back=8.0),
    "powersgd1": Packing(columns=1, there=60.0, back=18.0),
    "powersgd2": Packing(columns=2, there=62.0, back=23.0),
    "powersgd4": Packing(columns=4, there=65.0, back=32.0),
}
"""By name of `Lane.compression`, those that lose bits: scales and places count in the ratio."""
LOSSLESS_PACKING = Packing(ratio=0.84, there=80.0, back=70.0)
"""What gradients of the examples and normal values take, 0.82 to 0.86 of their bytes: docs/log.md."""


def packing_of(compression: str | None) -> Packing:
    """What a lane with this compression makes of its values."""
    if compression is None:
        return PLAIN
    return LOSSLESS_PACKING if compression == LOSSLESS else PACKINGS[compression]


def exchange_seconds(num_bytes: float, exchange: Exchange, fleet: Fleet) -> float:
    """Seconds to sum `num_bytes` bytes of float32 as `exchange` says.

        k     = ⌈num_bytes / 2 MiB⌉ pieces
        piece = collect + scatter + gather + spread
        sum   = piece + (k - 1) · max(link, device, scatter / 2, gather / 2)

    with link = both rounds' bytes over the busiest port, and device = collect + spread + packing, which share
    what they run on. A round between groups lasts as long as its busiest port or its slowest flow, plus
    packing; two tracks of stages work at once, so of two pieces one packs while the other travels. Links
    that are not known cost nothing. Example: 2 hosts of 2 at 12.5 MB/s, 20 MB: 1.6 s and a little.
    """
    pieces = max(1, -(-int(num_bytes) // PIECE_BYTES))
    size = num_bytes / pieces
    inside = 2 * _inside_s(size, exchange, fleet)
    rounds = [_Round(size, exchange, fleet, scatters=scatters) for scatters in (True, False)]
    packs = [_packing_s(size, exchange, fleet, scatters) for scatters in (True, False)]
    both = [r.seconds + p for r, p in zip(rounds, packs, strict=True)]
    ports = {port for r in rounds for port in r.ports}
    link = max((sum(r.ports.get(port, 0.0) for r in rounds) for port in ports), default=0.0)
    slowest = max(link, inside + sum(packs), *(x / TRACKS for x in both))
    return inside + sum(both) + (pieces - 1) * slowest


def _inside_s(size: float, exchange: Exchange, fleet: Fleet) -> float:
    """One way inside the slowest group: its owners take the others' values, or send them.

    Members of one host share its memory, so the group's messages follow one another.
    """
    slowest = 0.0
    for group in exchange.groups:
        spent = 0.0
        for lane, owner in zip(exchange.lanes, exchange.owners(group[0]), strict=True):
            for member in group:
                link = fleet.link(member, owner) if member != owner else None
                if link is not None and lane.part:
                    spent += link.curve.seconds(lane.part * size)
        slowest = max(slowest, spent)
    return slowest


class _Round:
    """Seconds in which all lanes have passed one round's bytes on, and those by port, each way for itself."""

    def __init__(self, size: float, exchange: Exchange, fleet: Fleet, *, scatters: bool) -> None:
        held: dict[tuple, float] = defaultdict(float)
        curves: dict[tuple, Curve] = {}
        slowest = 0.0
        for lane in exchange.lanes:
            for source, target, num_bytes in _flows(size, lane, scatters):
                link = fleet.link(source, target)
                if link is None or not num_bytes:
                    continue
                slowest = max(slowest, link.curve.seconds(num_bytes))
                for way, end in (("out", source), ("in", target)):
                    port = (way, *_port(fleet, link, end))
                    held[port] += num_bytes
                    known = curves.setdefault(port, link.curve)
                    if known is not link.curve and link.curve.seconds(1e6) < known.seconds(1e6):
                        curves[port] = link.curve
        self.ports = {port: curves[port].seconds(num_bytes) for port, num_bytes in held.items()}
        self.seconds = max([slowest, *self.ports.values()])


def _flows(size: float, lane: Lane, scatters: bool) -> Iterator[tuple[str, str, float]]:
    """(from, to, bytes) of a lane's round: slices go to who adds them up, sums come back from there."""
    whole = sum(lane.adds)
    packing = packing_of(lane.compression)
    n = len(lane.devices)
    if goes_round(lane):
        for i, source in enumerate(lane.devices):
            yield source, lane.devices[(i + 1) % n], (n - 1) * packing.on_wire(lane.part * size / n)
        return
    for i, source in enumerate(lane.devices):
        for j, target in enumerate(lane.devices):
            if i != j:
                slice_ = lane.adds[j if scatters else i] / whole
                yield source, target, packing.on_wire(lane.part * size * slice_)


def _port(fleet: Fleet, link: Link, device: str) -> tuple[str, str]:
    """What a flow leaves or enters by: the bus, the device's own link, or its host's."""
    host = fleet.device(device).host
    if link.bus:
        return link.bus, host
    return ("", device if device in (link.a, link.b) else host)


def _packing_s(size: float, exchange: Exchange, fleet: Fleet, scatters: bool) -> float:
    """Seconds of the busiest device to write and read one round's messages, each on cores of its own."""
    busy: dict[str, float] = defaultdict(float)
    for lane in exchange.lanes:
        packing = packing_of(lane.compression)
        whole = sum(lane.adds)
        for device, adds in zip(lane.devices, lane.adds, strict=True):
            values = lane.part * size / VALUE_BYTES
            own, rest = values * adds / whole, values * (1 - adds / whole)
            others = len(lane.devices) - 1
            said = packing.back if lane.loses else 0.0  # who sums takes what it told the others
            touched = (
                rest * packing.there + others * own * packing.back
                if scatters
                else own * (packing.there + said) + rest * packing.back
            )
            rate = fleet.device(device).bytes_per_s
            busy[device] += touched / (rate.value if rate else HOST_BYTES_PER_S)
    return max(busy.values(), default=0.0)
