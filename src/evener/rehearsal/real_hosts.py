"""Hosts of a fleet file as network namespaces, and what is to be run to join them by real, shaped links.

    lab1 ── e0 ───────────── bridge "s0" ────────────── e0 ── lab2     unshaped: the job's store, and pairs
         └─ e1 ─tbf──────── bridge "s1" ─────────tbf── e1 ─┘           of hosts that no link is named for

Every host has one address, on e0; the way to another host goes over the link of the two. Links without a
bus are cables of their own, those that name one bus are one switch. Pure: a fleet gives commands.
"""

from collections.abc import Mapping
from itertools import combinations

from msgspec.structs import replace

from evener.core.figures import Curve, Value
from evener.core.fleet import Fleet, Link
from evener.errors import UsageError
from evener.rehearsal.namespaces import Command, command, tbf, veth

SWITCHES = "switches"
MEETING = "198.18.0.1"
"""Where the job's store listens, in the switches' namespace; the range is set aside for tests (RFC 2544)."""
INTERFACE = "e0"
MOST_HOSTS = 24  # 276 links and some 3,000 commands
HEADERS = 1514 / 1448
"""Bytes on the wire for bytes of a message: Ethernet's 14, IPv4's 20 and TCP's 32 in packets of 1500."""


class Segment(Value, frozen=True, kw_only=True):
    """Hosts that one real link joins: two, or those on a bus."""

    hosts: tuple[str, ...]
    curve: Curve


def hosts_of(fleet: Fleet) -> tuple[str, ...]:
    """The hosts in the order of their first devices."""
    return tuple(dict.fromkeys(d.host for d in fleet.devices))


def address_of(fleet: Fleet, host: str) -> str:
    """The address of a host's namespace. Example: the first one's is 198.18.0.2."""
    return f"198.18.0.{hosts_of(fleet).index(host) + 2}"


def inside_hosts(fleet: Fleet) -> Fleet:
    """The fleet without its links between hosts: what is still paced where those are real."""
    host = _host_by_end(fleet)
    return replace(fleet, links=tuple(x for x in fleet.links if host[x.a] == host[x.b]))


def check_hosts(fleet: Fleet) -> None:
    """UsageError for a fleet whose hosts cannot be namespaces joined by its links."""
    hosts = hosts_of(fleet)
    if not 2 <= len(hosts) <= MOST_HOSTS:
        raise UsageError(
            f"real links join 2 to {MOST_HOSTS} hosts, and the fleet has {len(hosts)}",
            numbers=f"hosts: {', '.join(hosts[:MOST_HOSTS])}",
            remedy="the same command without --real-links",
        )
    host = _host_by_end(fleet)
    for link in fleet.links:
        if host[link.a] != host[link.b] and not {link.a, link.b} <= set(hosts):
            raise UsageError(
                f"the link {link.a} - {link.b} is of one device, and a real link is of whole hosts",
                remedy=f"a link {host[link.a]} - {host[link.b]}; or the same command without --real-links",
            )
    segments(fleet)


def segments(fleet: Fleet) -> tuple[Segment, ...]:
    """The real links: one a pair of hosts, one a bus; UsageError where links of one bus differ."""
    by_ends: dict[frozenset[str], Link] = {frozenset((x.a, x.b)): x for x in reversed(fleet.links)}
    found: list[Segment] = []
    buses: dict[str, list[Link]] = {}
    for pair in combinations(hosts_of(fleet), 2):
        link = by_ends.get(frozenset(pair))
        if link is None:
            continue
        if link.bus is None:
            found.append(Segment(hosts=pair, curve=link.curve))
        else:
            buses.setdefault(link.bus, []).append(link)
    for bus, links in buses.items():
        if any(x.curve.points != links[0].curve.points for x in links):
            raise UsageError(
                f"links of the bus {bus!r} have different curves, and a real one has one rate",
                numbers=", ".join(f"{x.a} - {x.b}" for x in links),
                remedy="one curve for all of them",
            )
        on_it = {end for x in links for end in (x.a, x.b)}
        found.append(Segment(hosts=tuple(h for h in hosts_of(fleet) if h in on_it), curve=links[0].curve))
    return tuple(found)


def bytes_per_s(curve: Curve) -> float | None:
    """The rate of long messages, the slope at the end; None where more bytes take no longer."""
    if len(curve.points) < 2:
        return None
    (b0, s0), (b1, s1) = curve.points[-2:]
    return (b1 - b0) / (s1 - s0) if s1 > s0 else None


def commands(fleet: Fleet) -> tuple[Command, ...]:
    """What builds the hosts and their links in namespaces of the hosts' names and `SWITCHES`.

    A link's rate is that of its messages, so packets may take `HEADERS` times as much. Example: a link of
    12.5 MB/s is shaped to 104.6 Mbit/s.
    """
    hosts = hosts_of(fleet)
    number = {host: i for i, host in enumerate(hosts, start=1)}
    place = {host: host_place(host) for host in hosts}
    made = [command(p, "ip link set lo up") for p in (SWITCHES, *place.values())]
    made += _bridge("s0")
    made.append(command(SWITCHES, f"ip addr add {MEETING}/24 dev s0"))
    for host in hosts:
        made += _cable(place[host], INTERFACE, f"p{number[host]}", "s0")
        made.append(command(place[host], f"ip addr add {address_of(fleet, host)}/24 dev {INTERFACE}"))
    for k, segment in enumerate(segments(fleet), start=1):
        made += _bridge(f"s{k}")
        for host in segment.hosts:
            port = f"s{k}p{number[host]}"
            made += _cable(place[host], f"e{k}", port, f"s{k}")
            source = address_of(fleet, host)
            ways = [address_of(fleet, other) for other in segment.hosts if other != host]
            made += [command(place[host], f"ip route add {a}/32 dev e{k} src {source}") for a in ways]
            rate = bytes_per_s(segment.curve)
            if rate is not None:
                made.append(tbf(place[host], f"e{k}", 8 * rate * HEADERS))
                if len(segment.hosts) > 2:  # what several send to one host at once shares its way in
                    made.append(tbf(SWITCHES, port, 8 * rate * HEADERS))
    return tuple(made)


def delays(fleet: Fleet) -> tuple[Command, ...]:
    """What gives links their latency: netem, under what shapes them. Not every kernel has it.

    Example: a curve that begins at 1 ms delays packets either way by 1,000 µs.
    """
    made = []
    for k, segment in enumerate(segments(fleet), start=1):
        shaped = bytes_per_s(segment.curve) is not None
        where = "parent 1:1 handle 10:" if shaped else "root handle 10:"
        delay_us = round(1e6 * segment.curve.points[0][1])
        made += [
            command(host_place(h), f"tc qdisc replace dev e{k} {where} netem delay {delay_us}us limit 10000")
            for h in segment.hosts
            if delay_us
        ]
    return tuple(made)


def host_place(host: str) -> str:
    """The name of a host's namespace, which no host's own name can take from the switches."""
    return f"host {host}"


def _bridge(name: str) -> list[Command]:
    return [
        command(SWITCHES, f"ip link add {name} type bridge"),
        command(SWITCHES, f"ip link set {name} up"),
    ]


def _cable(place: str, inside: str, port: str, bridge: str) -> list[Command]:
    return [
        veth(place, inside, SWITCHES, port),
        command(SWITCHES, f"ip link set {port} master {bridge} up"),
        command(place, f"ip link set {inside} up"),
    ]


def _host_by_end(fleet: Fleet) -> Mapping[str, str]:
    """The host of each end that a link may name: a device's, a CPU's, or the host itself."""
    devices = (*fleet.devices, *fleet.hosts)
    return {d.name: d.host for d in devices} | {d.host: d.host for d in devices}
