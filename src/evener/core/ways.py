"""How the processes of a job reach each other: what was tried with real data, which way is taken, and why.

    lab1   docker0 172.17.0.1, eth0 10.0.0.1, eth1 10.9.0.1    each process dials all addresses of the others;
    lab2   docker0 172.17.0.1, eth0 10.0.0.2, eth1 10.9.0.2    docker0 leads back home, eth1 is dead: eth0

A process listens on one interface, and that has to serve all its peers: Gloo and NCCL know no other way.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Literal

from msgspec.structs import replace

from evener.core.figures import Value
from evener.core.host import Interface

FASTER = 1.5
"""Another interface than the route's is taken when it is so many times as fast (or the route's fails)."""
SHOWN_VARIABLES = ("GLOO_", "NCCL_", "RCCL_", "TORCH_GLOO_")
"""How the variables begin that decide the transport: the user's are shown and kept."""


class Spot(Value, frozen=True, kw_only=True):
    """Where one process stands: its host, its interfaces, and the port on which it waits for the others.

    `route` is the interface by which its kernel reaches the job's meeting place, `environment` the user's
    variables that decide the transport. `host` is the same for the processes of one network namespace;
    `within` is true where all processes are on one host, which then talk over loopback.
    """

    process: str
    host: str
    port: int
    interfaces: tuple[Interface, ...] = ()
    route: str = ""
    environment: dict[str, str] = {}
    within: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ValueError(f"{self.process} waits on port {self.port}, which is none")

    @property
    def doors(self) -> dict[str, str]:
        """Address by interface, of those that others might reach; only what the user named, if anything."""
        found = {i.name: a for i in self.interfaces if i.up and (a := _address(i, loopback=self.within))}
        named = self.named
        return {n: a for n, a in found.items() if n in named} if named else found

    @property
    def named(self) -> tuple[str, ...]:
        """The interfaces that the user's GLOO_SOCKET_IFNAME names."""
        return tuple(n for n in self.environment.get("GLOO_SOCKET_IFNAME", "").split(",") if n)


def _address(interface: Interface, *, loopback: bool) -> str:
    """The address of an interface that Gloo would listen on: IPv4 first, none that is of one link only."""
    known = [ip_address(a) for a in interface.addresses]
    able = [a for a in known if not a.is_link_local and a.is_loopback == loopback]
    return str(min(able, key=lambda a: a.version)) if able else ""


class Attempt(Value, frozen=True, kw_only=True):
    """One process that dialled another at one of its addresses, with real data.

    `latency_s` is one way, `bytes_per_s` what arrived, `by` the dialling side's own interface. `error` says
    what went wrong, also where data arrived changed; empty for an attempt that went well.
    """

    source: str
    target: str
    interface: str
    address: str
    by: str = ""
    latency_s: float | None = None
    bytes_per_s: float | None = None
    error: str = ""


class Door(Value, frozen=True, kw_only=True):
    """The interface on which a process listens for all others, and the sentence why."""

    process: str
    interface: str
    address: str
    why: str
    by_user: bool = False


class Way(Value, frozen=True, kw_only=True):
    """How a pair of processes talks: over which interfaces, how fast, and why so; or that it cannot."""

    a: str
    b: str
    interface_a: str = ""
    interface_b: str = ""
    latency_s: float | None = None
    bytes_per_s: float | None = None
    dead: bool = False
    why: str = ""


class Verdict(Value, frozen=True, kw_only=True):
    """What the preflight decided: a door for each process, a way for each pair, and variables to set.

    `variables` has, by process, what has to be in its environment before it joins a group.
    """

    doors: tuple[Door, ...]
    ways: tuple[Way, ...]
    variables: dict[str, dict[str, str]] = {}
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def dead(self) -> tuple[Way, ...]:
        return tuple(w for w in self.ways if w.dead)


def decide(spots: Sequence[Spot], attempts: Sequence[Attempt]) -> Verdict:
    """The door of each process and the way of each pair, from what was tried.

    The user's own interface is kept, whatever was measured. Else the route's, if data over it came back right
    from every peer; else, or where it is `FASTER` times as fast, the one that most peers reach, the fastest
    of those. A pair needs both directions: who dials is up to Gloo. Example: eth0 (the route) at 12 MB/s and
    eth1 at 118 MB/s, both right: eth1.
    """
    table: dict[str, dict[str, dict[str, Attempt]]] = defaultdict(lambda: defaultdict(dict))
    for attempt in attempts:
        table[attempt.target][attempt.interface][attempt.source] = attempt
    names = [s.process for s in spots]
    doors = {s.process: _door(s, table[s.process], [n for n in names if n != s.process]) for s in spots}
    ways = []
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            ways.append(_way(a, b, doors, table))
    return Verdict(
        doors=tuple(doors.values()),
        ways=tuple(ways),
        variables={s.process: variables_of(s, doors[s.process]) for s in spots},
        notes=tuple(_shown(spots)),
    )


def variables_of(spot: Spot, door: Door) -> dict[str, str]:
    """What this process has to have in its environment: the door's interface, where the user names none.

    Nothing within one host. Example: {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}.
    """
    needed = door.interface and not spot.within
    wanted = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if needed else ()
    return {name: door.interface for name in wanted if not spot.environment.get(name)}


def _shown(spots: Sequence[Spot]) -> list[str]:
    said: dict[str, list[str]] = {}
    for spot in spots:
        for name, value in sorted(spot.environment.items()):
            said.setdefault(f"{name}={value}", []).append(spot.process)
    return [
        f"kept: {setting} ({'every process' if len(who) == len(spots) else ', '.join(who)})"
        for setting, who in said.items()
    ]


def _door(spot: Spot, tried: Mapping[str, Mapping[str, Attempt]], peers: Sequence[str]) -> Door:
    doors = spot.doors
    reached = {
        name: [p for p in peers if (t := tried.get(name, {}).get(p)) and not t.error] for name in doors
    }
    rates = {name: _rate(tried.get(name, {})) for name in doors}

    def door(name: str, why: str, *, by_user: bool = False) -> Door:
        address = doors.get(name, "")
        return Door(process=spot.process, interface=name, address=address, why=why, by_user=by_user)

    if spot.named:
        return _named(spot, doors, reached, peers, door)
    if not doors:
        return door("", "no interface is up that has an address others could reach")
    best = max(doors, key=lambda n: (len(reached[n]), n == spot.route, rates[n] or 0.0))
    most = [n for n in doors if len(reached[n]) == len(reached[best])]
    quick = max(most, key=lambda n: rates[n] or 0.0)
    if (rates[quick] or 0.0) >= FASTER * (rates[best] or float("inf")):
        why = f"{quick}: {_speed(rates[quick])}, {best} {_speed(rates[best])}"
        return door(quick, why + (", though that is the route" if best == spot.route else ""))
    if not reached[best]:
        return door(best, f"{best}: no peer reaches any interface")
    if best == spot.route or not spot.route:
        whom = "every peer" if len(reached[best]) == len(peers) else f"{len(reached[best])} of {len(peers)}"
        return door(best, f"{best}: the route to the others, and data from {whom} came through")
    trouble = _trouble(tried.get(spot.route, {}), spot.route)
    return door(best, f"{best}, not {spot.route} of the route: {trouble}")


def _named(spot: Spot, doors, reached, peers: Sequence[str], door) -> Door:
    name = next((n for n in spot.named if n in doors), spot.named[0])
    setting = f"GLOO_SOCKET_IFNAME={','.join(spot.named)} of yours is kept"
    if name not in doors:
        return door(name, f"{setting}, but {name} has no address that others could reach", by_user=True)
    missing = [p for p in peers if p not in reached[name]]
    trouble = f", but {', '.join(missing)} cannot reach it" if missing else ""
    return door(name, f"{name}: {setting}{trouble}", by_user=True)


def _rate(tried: Mapping[str, Attempt]) -> float | None:
    """The slowest of the peers' rates: a sum waits for the slowest."""
    return min((t.bytes_per_s for t in tried.values() if t.bytes_per_s and not t.error), default=None)


def _speed(bytes_per_s: float | None) -> str:
    return "not measured" if bytes_per_s is None else mbit(bytes_per_s)


def mbit(bytes_per_s: float) -> str:
    """A rate as networks name it. Example: mbit(11.9e6) is "95.2 Mbit/s"; mbit(1.2e9) is "9.6 Gbit/s"."""
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 999.5e6 else f"{bits / 1e6:.3g} Mbit/s"


def _trouble(tried: Mapping[str, Attempt], interface: str) -> str:
    errors = Counter(t.error for t in tried.values() if t.error)
    if not errors:
        return f"{interface} has no address that others could reach" if not tried else "fewer peers reach it"
    return errors.most_common(1)[0][0]


def _way(
    a: str, b: str, doors: Mapping[str, Door], table: Mapping[str, Mapping[str, Mapping[str, Attempt]]]
) -> Way:
    """Both directions over the chosen doors; the slower numbers of the two count."""
    there = table[b].get(doors[b].interface, {}).get(a)
    back = table[a].get(doors[a].interface, {}).get(b)
    pair = f"{a} and {b}"
    good = [t for t in (there, back) if t is not None and not t.error]
    pair_of = Way(a=a, b=b, interface_a=doors[a].interface, interface_b=doors[b].interface)
    if len(good) == 2:
        latency = max((t.latency_s for t in good if t.latency_s), default=None)
        rate = min((t.bytes_per_s for t in good if t.bytes_per_s), default=None)
        return replace(
            pair_of,
            latency_s=latency,
            bytes_per_s=rate,
            why=f"{pair}: data came back right over {doors[a].interface} and {doors[b].interface}",
        )
    if len(good) == 1:
        first, second = (a, b) if good[0] is there else (b, a)
        other = back if good[0] is there else there
        error = other.error if other is not None else "it was not tried"
        why = f"{pair}: {first} reaches {second}, but not the other way round ({error}): a firewall or NAT?"
        return replace(pair_of, dead=True, why=why)
    errors = dict.fromkeys(
        f"{t.source} to {t.address} ({t.interface} of {t.target}): {t.error}"
        for x, y in ((a, b), (b, a))
        for by_source in table[y].values()
        if (t := by_source.get(x)) is not None and t.error
    )
    tried = "; ".join(errors) or "neither has an address that the other could dial"
    return replace(pair_of, dead=True, why=f"{pair} do not reach each other. {tried}")


PeerState = Literal["direct", "staged", "lies"]


class PeerCopy(Value, frozen=True, kw_only=True):
    """Two accelerators of one host: whether they reach each other's memory, and whether a copy was right.

    "direct": the driver says so, and data arrived unchanged. "staged": it goes through host memory. "lies":
    the driver says direct, and the data that arrived was other data.
    """

    a: str
    b: str
    state: PeerState
    bytes_per_s: float | None = None


def peer_variables(
    copies: Sequence[PeerCopy], environment: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """What to set about direct copies between accelerators, and the sentences why.

    One pair that lies ends direct copies for NCCL on this host; a variable of the user's stays, and the
    sentence says that it does harm. Example: {"NCCL_P2P_DISABLE": "1"}.
    """
    lying = [c for c in copies if c.state == "lies"]
    if not lying:
        return {}, []
    pairs = ", ".join(f"{c.a} and {c.b}" for c in lying)
    said = f"copies between {pairs} arrive changed, though the driver calls them direct"
    kept = environment.get("NCCL_P2P_DISABLE")
    if kept is not None:
        harm = "" if kept == "1" else ": set it to 1"
        return {}, [f"{said}; your NCCL_P2P_DISABLE={kept} is kept{harm}"]
    return {"NCCL_P2P_DISABLE": "1"}, [f"{said}: they go through host memory (NCCL_P2P_DISABLE=1)"]
