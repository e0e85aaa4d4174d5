"""Which way gradients are summed: one ring over all devices, or groups and lanes, compressed or not.

The candidates are few. Each is priced as it was tried on these links, else with the formula that the runtime
keeps to, and the choice is the least of the predicted seconds.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache

from msgspec.structs import replace

from evener.core.collectives import all_reduce_seconds, ring, ring_order, slowed
from evener.core.exchange import LOSSLESS, Exchange, exchange_of, loses, reductions_of, said_of
from evener.core.exchange_seconds import exchange_seconds
from evener.core.figures import Curve
from evener.core.fleet import Fleet
from evener.core.plan import Plan, Reduction
from evener.core.split import apportion
from evener.cost.communication import Network

LEAST_GAIN = 0.03
"""A way is left for another only if that saves so much: predictions are no better than this."""
VENDORS = {"cuda": "nccl", "xpu": "xccl"}
"""What each type of accelerator talks with among its own."""
_TYPICAL_BYTES = 1e6
_STEPS = 40  # of a bisection: a part in 10^12
_KEPT = "what that loses is kept and added to the next step's, and dropped when a device is lost"
LOSSES = {
    "bf16": "rounded to 8 bits of precision",
    "fp16": "rounded to 11 bits of precision",
    "int8": f"255 levels for each 256 values, rounded by chance; {_KEPT}",
    "int4": f"15 levels for each 64 values, rounded by chance; {_KEPT}",
    "top1%": f"only the largest hundredth; {_KEPT}",
    "powersgd1": f"as a column times a row; {_KEPT}",
    "powersgd2": f"as 2 columns times rows; {_KEPT}",
    "powersgd4": f"as 4 columns times rows; {_KEPT}",
}
RING = "one ring over all devices that take samples"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to sum: what the plan says, and seconds by bytes of one buffer."""

    name: str
    reductions: tuple[Reduction, ...]
    seconds: Callable[[float], float]
    compression: str | None = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The way taken, the sentence why, and all ways with their seconds for the buffers asked about."""

    way: Way
    why: str
    seconds: dict[str, float]

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """The plan's, the reason with the last of them: how the hosts are joined is what was chosen."""
        *before, last = self.way.reductions
        return (*before, _with_reason(last, self.why))


def choose_way(
    fleet: Fleet,
    names: tuple[str, ...],
    buffers: Sequence[float],
    *,
    sums: str = "auto",
    compress: Sequence[str] = (),
) -> Choice:
    """The way that sums `buffers` (bytes each) over two or more devices in the fewest seconds.

    `sums` "ring" or "grouped" takes that one; `compress` names what may be used between hosts. A lossy way
    must save `LEAST_GAIN` against every exact one. Example: 2 hosts of 2 at 12.5 MB/s: 1.6 s for 20 MB where
    one ring takes 2.4 s.
    """
    ways = ways_of(fleet, names, compress)
    if sums == "ring":
        ways = [w for w in ways if w.name == "ring"]
    elif sums == "grouped" and len(ways) > 1:
        ways = [w for w in ways if w.name != "ring"]
    once = [{b: w.seconds(b) for b in set(buffers)} for w in ways]  # a model's buckets are of a few sizes
    seconds = {w.name: sum(map(by_size.__getitem__, buffers)) for w, by_size in zip(ways, once, strict=True)}
    exact = [w for w in ways if not loses(w.compression)]
    best = exact[0]
    for way in (*exact[1:], *(w for w in ways if loses(w.compression))):
        if seconds[way.name] < seconds[best.name] * (1 - LEAST_GAIN):
            best = way
    return Choice(way=best, why=_why(best, ways, seconds, sum(buffers), sums), seconds=seconds)


def ways_of(fleet: Fleet, names: tuple[str, ...], compress: Sequence[str] = ()) -> list[Way]:
    """All ways worth pricing: the ring first, then groups with one lane and with one for each member."""
    hops = _ring(fleet, names)
    ring_way = Reduction(devices=names, transport=transport_of({fleet.device(n).type for n in names}))
    tried = fleet.tried_sum(spelled_ring(names))
    by_ring = tried.seconds if tried else lambda size: all_reduce_seconds(size, hops)
    ways = [Way(name="ring", reductions=(ring_way,), seconds=by_ring)]
    hosts: dict[str, list[str]] = {}
    for name in names:
        hosts.setdefault(fleet.device(name).host, []).append(name)
    if len(hosts) < 2 or any(hop is None for hop in hops):
        return ways
    most = max(len(members) for members in hosts.values())
    for count in sorted({1, most}):
        plain = _grouped(fleet, list(hosts.values()), count)
        for compression in (None, LOSSLESS, *compress):
            reductions = tuple(_packed(r, compression) for r in plain)
            exchange = exchange_of(reductions, names)
            assert exchange is not None
            lanes = "1 lane" if count == 1 else f"{count} lanes"
            by = f", {compression}" if compression else ""
            ways.append(
                Way(
                    name=f"{lanes}{by}",
                    reductions=reductions,
                    seconds=_priced(exchange, fleet),
                    compression=compression,
                )
            )
    return ways


def transport_of(types: Collection[str]) -> str:
    """What devices of these types talk with: their vendor's library if all are of one type that has one.

    Gloo serves all others, and mixtures. Examples: {"cuda"} is "nccl", {"cuda", "cpu"} "gloo".
    """
    return VENDORS.get(next(iter(types)), "gloo") if len(types) == 1 else "gloo"


def _ring(fleet: Fleet, names: tuple[str, ...]) -> tuple[Curve | None, ...]:
    """The hops of a ring in the order of `names`, which is how a backend goes round.

    Where that is not host by host, several hops leave a host by the one link at once and share its rate.
    """
    if ring_order(fleet, names) == list(names):
        return ring(fleet, names)
    pairs = list(zip(names, names[1:] + names[:1], strict=True))
    ways = [tuple(fleet.device(d).host for d in pair) for pair in pairs]
    crossing = Counter(way[0] for way in ways if way[0] != way[1])
    return tuple(
        None if link is None else slowed(link.curve, crossing[way[0]] if way[0] != way[1] else 1)
        for link, way in zip((fleet.link(*pair) for pair in pairs), ways, strict=True)
    )


def spelled_ring(names: Sequence[str]) -> str:
    """One ring over `names`, as `Exchange.spelled` has groups and lanes."""
    return f"ring {'+'.join(names)}"


def _priced(exchange: Exchange, fleet: Fleet) -> Callable[[float], float]:
    """Seconds by bytes; each size is priced once."""
    tried = fleet.tried_sum(exchange.spelled)
    return tried.seconds if tried else cache(lambda size: exchange_seconds(size, exchange, fleet))


def _grouped(fleet: Fleet, hosts: list[list[str]], count: int) -> tuple[Reduction, ...]:
    """Groups by host, and `count` lanes by the members with the best paths, in parts by their rate."""
    inside = []
    for members in hosts:
        if len(members) > 1:
            where = fleet.device(members[0]).host
            inside.append(Reduction(devices=tuple(members), transport="gloo", reason=f"together on {where}"))
    order = [
        sorted(members, key=lambda m: _best_s(fleet, m, [d for h in hosts if h is not members for d in h]))
        for members in hosts
    ]
    lanes = [tuple(members[i % len(members)] for members in order) for i in range(count)]
    rates = [1 / _slowest_s(fleet, lane) for lane in lanes]
    return (
        *inside,
        *(
            Reduction(
                devices=lane,
                transport="gloo",
                part=rate / sum(rates),
                adds=_adds(fleet, lane),
                reason=f"between hosts, {rate / sum(rates):.0%} of the values",
            )
            for lane, rate in zip(lanes, rates, strict=True)
        ),
    )


def _packed(reduction: Reduction, compression: str | None) -> Reduction:
    """A lane with its values compressed; sums inside a host stay as they are."""
    if reduction.part is None or compression is None:
        return reduction
    reason = f"{reduction.reason}{said_of(compression)}"
    return replace(reduction, compression=compression, reason=reason)


def _best_s(fleet: Fleet, name: str, others: Sequence[str]) -> float:
    """Seconds of a message of 1 MB over the best path of `name` to other hosts."""
    return min(_message_s(fleet, name, other) for other in others)


def _slowest_s(fleet: Fleet, lane: Sequence[str]) -> float:
    return max(_message_s(fleet, a, b) for i, a in enumerate(lane) for b in lane[:i])


def _message_s(fleet: Fleet, a: str, b: str) -> float:
    link = fleet.link(a, b)
    return link.curve.seconds(_TYPICAL_BYTES) if link else float("inf")


def _adds(fleet: Fleet, lane: tuple[str, ...]) -> dict[str, float]:
    """The part of a lane's values that each member adds up, so that all links are done at once.

        bytes of a member = 1 + part · (n - 2)        least T with  bytes ≤ T · rate  everywhere

    A member with a slow link adds up less. Equal for two members, where it makes no difference. Example: 3
    members, one at a tenth of the rate: 1/2, 1/2 and 0.
    """
    n = len(lane)
    rates = [1 / _best_s(fleet, d, [x for x in lane if x != d]) for d in lane]
    if n == 2 or max(rates) < 1.1 * min(rates):
        return {}

    def parts(limit: float) -> list[float]:
        return [min(1.0, max(0.0, (limit * r / min(rates) - 1) / (n - 2))) for r in rates]

    low, high = 0.0, float(n)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(parts(middle)) >= 1 else (middle, high)
    thousandths = apportion(1000, parts(high))
    return {d: k / 1000 for d, k in zip(lane, thousandths, strict=True)}


def sums_of(network: Network, plan: Plan) -> Callable[[tuple[str, ...], float, int], float]:
    """Seconds of one sum under `plan`, by (devices, bytes, lanes of tensor-parallel groups).

    As the plan's reductions say of these devices, one ring where they say nothing. Of a plan that says
    nothing at all, as in a search, see `Network.all_reduce_s`.
    """
    if not plan.reductions:
        return network.all_reduce_s
    told: dict[tuple[str, ...], Callable[[float], float]] = {}

    def priced(names: tuple[str, ...]) -> Callable[[float], float]:
        exchange = exchange_of(reductions_of(plan, names), names)
        if exchange is not None:
            return _priced(exchange, network.fleet)
        tried = network.fleet.tried_sum(spelled_ring(names))
        return tried.seconds if tried else lambda size: network.flat_all_reduce_s(names, size)

    def seconds(names: tuple[str, ...], num_bytes: float, lanes: int) -> float:
        if lanes > 1:
            return network.all_reduce_s(names, num_bytes, lanes)
        if names not in told:
            told[names] = priced(names)
        return told[names](num_bytes)

    return seconds


def compressed_parts(reductions: Sequence[Reduction]) -> tuple[str, ...]:
    """Sentences for a plan's `inexact`, one for each compression."""
    used = dict.fromkeys(r.compression for r in reductions if r.compression and loses(r.compression))
    return tuple(f"gradients go between hosts as {name}: {LOSSES[name]}" for name in used)


def _why(best: Way, ways: Sequence[Way], seconds: dict[str, float], size: float, sums: str) -> str:
    told = ", ".join(f"{w.name} {_ms(seconds[w.name])}" for w in ways if w is not best)
    if not told:
        return RING if best.name == "ring" else f"{best.name} as asked for"
    asked = "as asked for, " if sums != "auto" else ""
    name = RING if best.name == "ring" else f"groups by host with {best.name}"
    return f"{asked}{name}: {_ms(seconds[best.name])} for {size / 1e6:.3g} MB; {told}"


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _with_reason(reduction: Reduction, why: str) -> Reduction:
    return replace(reduction, reason=f"{reduction.reason}; {why}" if reduction.reason else why)
