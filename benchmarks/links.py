"""Sums over hosts joined by slow links: one ring, grouped and compressed, predicted and measured.

    python benchmarks/links.py --json                              all topologies
    python benchmarks/links.py --only "2 hosts, 100 Mbit/s" --json

Hosts are network namespaces with `tc tbf` on their interfaces, so this needs root and iproute2. Every link is
measured by messages first. Then ways of summing are tried with at most 16.8 MB, as a job does before its
first step, and from that each way of summing 20 MB is predicted; then all are measured in turn, several
times, those near the fastest more often. `by links` is what the formula says of messages alone, as for ways
not tried. Other work on the machine only adds to seconds, so figures are lower quartiles.
The planner's choice must be the fastest measured, or within 3 % of it: less than what two turns of one way
differ by, and the gain for which the planner leaves the simpler way. Turn by turn it is held against each
other way, and the median of the ratios counts.
"""

import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import Bar, finish, parser, say  # noqa: E402

from evener.core.exchange import exchange_of, loses  # noqa: E402
from evener.core.figures import Curve, Figure  # noqa: E402
from evener.core.fleet import Device, Fleet, Link, TriedSum  # noqa: E402
from evener.core.plan import Reduction  # noqa: E402
from evener.cost.exchange import choose_way, ways_of  # noqa: E402
from evener.policy.trials import quick, trials_of  # noqa: E402
from evener.runtime.wire import GroupWire  # noqa: E402
from evener.runtime.wires.open import open_grouped  # noqa: E402
from evener.session.planning.trials import with_tried_sums  # noqa: E402
from tests.local.namespaces import Network  # noqa: E402

BUFFER_BYTES = 20 * 10**6
PORT = 29555
SIZES = (0, 2**16, 2**18, 2**20)
STREAM_BYTES = 2**22  # of messages that follow one another, where a link is measured
LEAST_REPEATS, MOST_REPEATS = 6, 40
OPENING_S = 300.0  # at most, for links, trials, and six turns of slow ways
LOSSLESS_PART = 0.834
"""Of the bytes of normal float32, what a lane sends that packs them without loss."""
NEAR = 1.1
"""After half of the time only ways within so many times the fastest exact one, or of all, are measured on."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Hosts with so many processes each; `mbit` by host, or with several switches by switch.

    Process m of a host listens on switch m, or on the last one. `interleaved` numbers them host by host in
    turn, as some launchers do. `most` is how many times as fast as the ring an exact sum can be, by the bytes
    that must cross: with n processes in order on H equal hosts (n - 1) / n over (H - 1) / H.
    """

    name: str
    members: tuple[int, ...]
    mbit: tuple[int, ...]
    most: float
    interleaved: bool = False
    switches: int = 1

    @property
    def devices(self) -> tuple[str, ...]:
        """Names in the order of ranks."""
        hosts = [[f"h{i}/{m}" for m in range(n)] for i, n in enumerate(self.members, start=1)]
        if self.interleaved:
            return tuple(h[m] for m in range(max(self.members)) for h in hosts if m < len(h))
        return tuple(d for h in hosts for d in h)

    def switch_of(self, device: str) -> int:
        return min(int(device.partition("/")[2]), self.switches - 1)


TOPOLOGIES = (
    Topology(name="2 hosts, 1 Gbit/s", members=(2, 2), mbit=(1000, 1000), most=1.5),
    Topology(
        name="2 hosts, 1 Gbit/s, ranks in turn", members=(2, 2), mbit=(1000, 1000), interleaved=True, most=3.0
    ),
    Topology(name="2 hosts, 100 Mbit/s", members=(2, 2), mbit=(100, 100), most=1.5),
    Topology(
        name="2 hosts, 100 Mbit/s, ranks in turn", members=(2, 2), mbit=(100, 100), interleaved=True, most=3.0
    ),
    Topology(name="3 hosts, 1 Gbit/s", members=(2, 2, 2), mbit=(1000, 1000, 1000), most=1.25),
    Topology(
        name="3 hosts, 1 Gbit/s, ranks in turn",
        members=(2, 2, 2),
        mbit=(1000, 1000, 1000),
        interleaved=True,
        most=2.5,
    ),
    Topology(name="3 hosts, 100 Mbit/s", members=(2, 2, 2), mbit=(100, 100, 100), most=1.25),
    Topology(name="3 hosts, one at 100 Mbit/s", members=(2, 2, 2), mbit=(1000, 1000, 100), most=1.67),
    Topology(
        name="2 hosts, two paths of 200 and 100 Mbit/s",
        members=(2, 2),
        mbit=(200, 100),
        switches=2,
        most=2.25,
    ),
)


class Trial(msgspec.Struct):
    """One way of summing that every process is to measure."""

    name: str
    reductions: tuple[Reduction, ...] = ()


class Told(msgspec.Struct):
    """What was measured on one topology: of links, sums that were tried, and sums of the whole buffer."""

    rate: float
    curves: list[list[tuple[float, float]]]
    sums: tuple[TriedSum, ...]
    why: str
    seconds: dict[str, list[float]]
    works: dict[str, list[float]]


def worker(
    rank: int, devices: tuple[str, ...], address: str, links: list, compress: tuple[str, ...], seconds: float
) -> None:
    """Measure the `links`, try sums, and measure every way; the first process prints all as JSON."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    store = dist.TCPStore(address, PORT, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=len(devices), timeout=timedelta(seconds=100)
    )
    rate = memory_rate()
    curves = measure_links(rank, devices, links)
    fleet = fleet_of(devices, links, curves, rate)

    def new_group(names: Any, backend: str) -> Any:
        return dist.new_group([devices.index(d) for d in names], backend=backend)

    tries = [trials_of(fleet, devices, allowed, BUFFER_BYTES) for allowed in ((), compress)]  # two jobs'
    sums: list[TriedSum] = []
    for trials in tries:
        ring, cpu = GroupWire(), torch.device("cpu")
        found = with_tried_sums(fleet, trials, devices[rank], ring, new_group, lambda wire: wire, cpu)
        sums += [s for s in found.sums if all(s.way != other.way for other in sums)]
    fleet = msgspec.structs.replace(fleet, sums=tuple(sums))
    ways = [Trial(w.name, w.reductions) for w in ways_of(fleet, devices, compress)]
    seconds_of, works = measure_trials(rank, devices, ways, time.monotonic() + seconds)
    if rank == 0:
        told = Told(rate, curves, fleet.sums, "; ".join(t.why for t in tries), seconds_of, works)
        print(msgspec.json.encode(told).decode())
    dist.barrier()


def measure_link(rank: int, a: int, b: int) -> list[tuple[float, float]]:
    """(bytes, seconds of one message in a stream of them).

    Both ways at once, as sums use a link. A stream, because a shaped link lets the first bytes after a rest
    pass at once.
    """
    points: list[tuple[float, float]] = []
    other = b if rank == a else a
    for size in SIZES:
        buffer = torch.zeros(max(1, size), dtype=torch.uint8)
        number = max(4, min(64, STREAM_BYTES // max(1, size)))
        taken = []
        for _ in range(3):
            start = time.perf_counter()
            coming = [dist.irecv(torch.empty_like(buffer), other) for _ in range(number)]
            going = [dist.isend(buffer, other) for _ in range(number)]
            for work in [*coming, *going]:
                work.wait()
            taken.append((time.perf_counter() - start) / number)
        points.append((float(size), max(quick(taken), points[-1][1] if points else 0.0)))
    return points


def measure_links(rank: int, devices: tuple[str, ...], links: list) -> list[list[tuple[float, float]]]:
    """Those inside hosts all at once, as sums use them; those between hosts one after another."""
    found: list[list[tuple[float, float]]] = [[] for _ in links]
    inside = [i for i, (a, b) in enumerate(links) if a.partition("/")[0] == b.partition("/")[0]]
    for turn in [inside, *([i] for i in range(len(links)) if i not in inside)]:
        dist.barrier()
        for i in turn:
            if devices[rank] in links[i]:
                found[i] = measure_link(rank, *(devices.index(d) for d in links[i]))
        for i in turn:
            told = [found[i]]
            dist.broadcast_object_list(told, devices.index(links[i][0]))
            found[i] = told[0]
    return found


def memory_rate() -> float:
    """Bytes of memory touched in a processor second while all other processes do the same: packing's rate."""
    source, target = torch.ones(2**24), torch.zeros(2**24)
    dist.barrier()
    start = time.process_time()
    for _ in range(5):
        target.copy_(source)
    told = torch.tensor([time.process_time() - start], dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return 5 * 2 * source.nbytes / float(told)


def measure_trials(
    rank: int, devices: tuple[str, ...], trials: list[Trial], end_s: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each sum until the last device has it, and processor seconds of all devices together.

    In turn, so that what disturbs disturbs all alike.
    """

    def new_group(names: Any, backend: str) -> Any:
        return dist.new_group([devices.index(d) for d in names], backend=backend)

    exchanges = {t.name: exchange_of(t.reductions, devices) for t in trials}
    wires = {n: open_grouped(e, devices[rank], 0, new_group) if e else None for n, e in exchanges.items()}
    buffer = torch.randn(BUFFER_BYTES // 4, generator=torch.Generator().manual_seed(rank))
    expected, values = buffer.clone(), torch.empty_like(buffer)
    dist.all_reduce(expected)
    near, half_s = set(wires), (time.monotonic() + end_s) / 2
    lossy = {n for n, e in exchanges.items() if e and e.loses}
    seconds: dict[str, list[float]] = {t.name: [] for t in trials}
    works: dict[str, list[float]] = {t.name: [] for t in trials}
    for turn in range(1 + MOST_REPEATS):
        start_s = time.monotonic()
        for name in [n for n in wires if n in near]:  # in the same order everywhere
            wire = wires[name]
            values.copy_(buffer)
            dist.barrier()
            start, work_start = time.perf_counter(), time.process_time()
            if wire:
                wire.all_reduce(values, "step 0, bucket 0").wait()
            else:
                dist.all_reduce(values)
            taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            worked = torch.tensor([time.process_time() - work_start], dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            dist.all_reduce(worked)
            if turn:  # the first one opens connections
                seconds[name].append(float(taken))
                works[name].append(float(worked))
            error = float((values - expected).norm() / expected.norm())
            assert error < (1.5 if name in lossy else 1e-6), f"{name}: {error}"
        # All go on, or stop, together: the clock is the first process's.
        now, is_enough = time.monotonic(), rank == 0 and turn >= LEAST_REPEATS
        told = torch.tensor([float(is_enough and 2 * now - start_s > s) for s in (half_s, end_s)])
        dist.all_reduce(told)
        if told[1]:
            break
        if told[0]:
            near = near_fastest(seconds, lossy)
    for wire in wires.values():
        if wire:
            wire.close()
    return seconds, works


def near_fastest(seconds: dict[str, list[float]], lossy: set[str]) -> set[str]:
    """The ways that may be the fastest exact one, or of all: alike on all processes."""
    taken = {name: quick(s) for name, s in seconds.items()}
    exact = min(s for name, s in taken.items() if name not in lossy)
    return {
        name
        for name, s in taken.items()
        if s <= NEAR * min(taken.values()) or (name not in lossy and s <= NEAR * exact)
    }


def shaped(net: Network, topology: Topology) -> None:
    for host in range(1, len(net.hosts) + 1):
        for k in range(topology.switches):
            mbit = topology.mbit[k if topology.switches > 1 else host - 1]
            net.shape_host(host, k, mbit)  # both ways: a host's slow link is slow to receive as well


def measured(
    topology: Topology, links: list[tuple[str, str]], compress: tuple[str, ...], seconds: float
) -> Told:
    devices = topology.devices
    with Network(len(topology.members), topology.switches) as net:
        shaped(net, topology)
        started = []
        for rank, device in enumerate(devices):
            host = int(device.partition("/")[0][1:])
            started.append(
                net.start(
                    host,
                    worker,
                    rank,
                    devices,
                    net.address(1),
                    links,
                    compress,
                    seconds,
                    GLOO_SOCKET_IFNAME=f"eth{topology.switch_of(device)}",
                )
            )
        ends = [s.finish(seconds + OPENING_S) for s in started]
    assert all(code == 0 for code, _, _ in ends), ends
    return msgspec.json.decode(ends[0][1], type=Told)


def links_of(topology: Topology) -> list[tuple[str, str]]:
    """The pairs to measure: neighbours inside hosts; between hosts one a pair of hosts, or one a path."""
    hosts: dict[str, list[str]] = {}
    for device in topology.devices:
        hosts.setdefault(device.partition("/")[0], []).append(device)
    members = list(hosts.values())
    inside = [(m[0], m[1]) for m in members if len(m) > 1]
    paths = range(topology.switches)
    between = [(a[k], b[k]) for i, a in enumerate(members) for b in members[i + 1 :] for k in paths]
    return inside + between


def fleet_of(devices: tuple[str, ...], links: list, curves: list, rate: float) -> Fleet:
    """The fleet as measured. A pair measured once for two hosts serves all their pairs."""
    memory = Figure(value=rate, source="measured")
    ends = [tuple(d.partition("/")[0] for d in pair) for pair in links]
    made = []
    for pair, hosts, points in zip(links, ends, curves, strict=True):
        alone = hosts[0] == hosts[1] or ends.count(hosts) == 1
        a, b = hosts if alone else pair
        curve = Curve(points=tuple(points), source="measured")
        made.append(Link(a=a, b=b, curve=curve))
        if not alone and all(x.a != hosts[0] or x.b != hosts[1] for x in made):
            made.append(Link(a=hosts[0], b=hosts[1], curve=curve))  # pairs across the paths
    return Fleet(
        devices=tuple(Device(name=d, kind="process", bytes_per_s=memory) for d in devices),
        links=tuple(made),
    )


def compared(topology: Topology, compress: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Seconds of every way, predicted and measured, and whether the choice was right."""
    links = links_of(topology)
    told = measured(topology, links, compress, seconds)
    by_links = fleet_of(topology.devices, links, told.curves, told.rate)
    fleet = msgspec.structs.replace(by_links, sums=told.sums)
    formula = {w.name: w.seconds(BUFFER_BYTES) for w in ways_of(by_links, topology.devices, compress)}
    ways = {w.name: w.seconds(BUFFER_BYTES) for w in ways_of(fleet, topology.devices, compress)}
    seconds = {name: quick(s) for name, s in told.seconds.items()}
    works = {name: quick(s) for name, s in told.works.items()}
    spread = {name: (median(s) - min(s)) / min(s) for name, s in told.seconds.items()}
    lossy = {w.name for w in ways_of(fleet, topology.devices, compress) if loses(w.compression)}
    chosen = {
        "exact": choose_way(fleet, topology.devices, [BUFFER_BYTES]).way.name,
        "any": choose_way(fleet, topology.devices, [BUFFER_BYTES], compress=compress).way.name,
    }
    fastest = {
        "exact": min((n for n in seconds if n not in lossy), key=seconds.__getitem__),
        "any": min(seconds, key=seconds.__getitem__),
    }
    say(f"{topology.name}: {told.why}")
    for name, s in seconds.items():
        say(
            f"  {name:14} predicted {1e3 * ways[name]:8.1f} ms  measured {1e3 * s:8.1f} ms "
            f"({ways[name] / s - 1:+.1%}; by links {formula[name] / s - 1:+.1%})  "
            f"{seconds['ring'] / s:.2f} x the ring, "
            f"{1e3 * works[name]:.1f} ms of processors, "
            f"{len(told.seconds[name])} times, median {spread[name]:.1%} above the least"
        )
    return {
        "topology": topology.name,
        "tried": told.why,
        "predicted_s": ways,
        "predicted_by_links_s": formula,
        "measured_s": seconds,
        "processor_s": works,
        "median_above_least": spread,
        "repeats": {name: len(s) for name, s in told.seconds.items()},
        "curves": told.curves,
        "memory_bytes_per_s": told.rate,
        "chosen": chosen,
        "fastest": fastest,
        "times_ring": max(
            seconds["ring"] / s for name, s in seconds.items() if name != "ring" and name not in lossy
        ),
        "behind_fastest": {
            kind: behind(way, told.seconds, lossy if kind == "exact" else set())
            for kind, way in chosen.items()
        },
    }


def behind(way: str, seconds: dict[str, list[float]], without: set[str]) -> float:
    """By how much `way` takes longer than the one it loses most to: the median of turns taken in pairs."""
    ratios = [
        median(mine / theirs for mine, theirs in zip(seconds[way], turns, strict=False))
        for name, turns in seconds.items()
        if name not in without
    ]
    return max(ratios) - 1


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--only", action="append", help="this topology; may be repeated")
    p.add_argument("--seconds", type=float, default=100.0, help="for each topology, about")
    p.add_argument("--compress", default="bf16,int8", help="ways between hosts, with commas")
    options = p.parse_args()
    chosen = [t for t in TOPOLOGIES if not options.only or t.name in options.only]
    found = [compared(t, tuple(options.compress.split(",")), options.seconds) for t in chosen]
    bars = []
    for row in found:
        name = row["topology"]
        bars += [
            Bar(
                name=f"{name}: {way}, predicted off by",
                value=abs(s / row["measured_s"][way] - 1),
                at_most=0.1,
            )
            for way, s in row["predicted_s"].items()
        ]
        most = next(t.most for t in TOPOLOGIES if t.name == name) / LOSSLESS_PART
        bars.append(
            Bar(
                name=f"{name}: grouped, times the ring (at most {most:.3g})",
                value=row["times_ring"],
                at_least=min(1.7, 0.95 * most),
            )
        )
        for kind, behind in row["behind_fastest"].items():
            bars.append(
                Bar(name=f"{name}: choice of {kind} ways, behind the fastest by", value=behind, at_most=0.03)
            )
    return finish({"topologies": found}, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
