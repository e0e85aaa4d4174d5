"""Several hosts make one fleet: each probes itself, and every pair measures the link between them.

first host: gather                          each other host: join
waits at an address, with a token   ◄────   token, its fleet, where others may dial it
names the hosts that came before    ────►   dials each of them: latency, rate     (one host at a time)
                                    ◄────   the links
when all have come: the one fleet   ────►   the same file everywhere
"""

import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from statistics import median
from typing import TypeVar

from evener.core.addresses import host_and_port
from evener.core.figures import Curve, Value
from evener.core.files import decode, encode
from evener.core.fleet import Fleet, Link
from evener.core.merging import merge
from evener.errors import EnvironmentBrokenError, EvenerError, UsageError
from evener.probing.trial import Waiter, look, rate

T = TypeVar("T")
MOST_BYTES = 16 * 2**20
MOST_HOSTS = 1024
COME_S = 600.0
"""How long hosts wait for each other: each probes itself first."""
DIAL_S = 10.0
KNOCK_S = 60.0
PAUSE_S = 0.25
MEASURE_S = 60.0
"""How long a host may take for the link to one other."""
ROUNDS = 3
RATE_S = 0.5
TOKEN_BYTES = 16
_HEAD = struct.Struct("<Q")
Say = Callable[[str], None]


class Guest(Value, frozen=True, kw_only=True):
    """A host that comes: its fleet, and where and with what secret others may measure towards it."""

    token: str
    host: str
    fleet: Fleet
    port: int
    secret: str


class Known(Value, frozen=True, kw_only=True):
    """A host that came before; `address` "" is the one that was joined."""

    host: str
    address: str
    port: int
    secret: str


class Welcome(Value, frozen=True, kw_only=True):
    """Whom to measure; `refusal` says why not."""

    others: tuple[Known, ...] = ()
    refusal: str = ""


class Measured(Value, frozen=True, kw_only=True):
    """The links that a host measured, and what went wrong with others."""

    links: tuple[Link, ...] = ()
    problems: tuple[str, ...] = ()


def new_token() -> str:
    """EVENER_TOKEN where it is set, else a new secret."""
    return os.environ.get("EVENER_TOKEN") or secrets.token_hex(TOKEN_BYTES)


def host_of(fleet: Fleet) -> str:
    """The one host of a probe's fleet; UsageError where it has several."""
    hosts = sorted({d.host for d in fleet.devices})
    if len(hosts) != 1:
        raise UsageError(f"a host joins with its own fleet, this one has {', '.join(hosts)}")
    return hosts[0]


def gather(
    fleet: Fleet,
    num_hosts: int,
    listener: socket.socket,
    *,
    token: str,
    come_s: float = COME_S,
    say: Say = print,
) -> Fleet:
    """One fleet of this host's `fleet` and `num_hosts` - 1 others that come to `listener` with the token.

    Hosts are let in one after another, so that no two measure at a time. Who has no token, speaks otherwise
    or has a name that is taken is told so and hung up on. EnvironmentBrokenError where not all have come
    within `come_s` seconds.
    """
    end = time.monotonic() + come_s
    fleets = {host_of(fleet): fleet}
    links: list[Link] = []
    problems: list[str] = []
    with ExitStack() as stack:
        own = stack.enter_context(Waiter(secrets.token_hex(TOKEN_BYTES), host=_bound_to(listener)))
        known = [Known(host=host_of(fleet), address="", port=own.port, secret=own.token)]
        peers = []
        while len(fleets) < num_hosts:
            listener.settimeout(max(0.01, end - time.monotonic()))
            try:
                peer, (address, *_) = listener.accept()
            except TimeoutError:
                raise _broken(f"{len(fleets)} of {num_hosts} hosts came within {come_s:g} s") from None
            stack.enter_context(peer)
            guest = _let_in(peer, address, token, fleets, say)
            if guest is None:
                peer.close()
                continue
            try:
                _send(peer, Welcome(others=tuple(known)))
                told = _receive(peer, Measured, MEASURE_S * len(known))
            except (OSError, EOFError, EvenerError) as e:
                say(f"{guest.host} went away while it measured: {e or 'it hung up'}")
                peer.close()
                continue
            fleets[guest.host] = guest.fleet
            links += told.links
            problems += told.problems
            known.append(Known(host=guest.host, address=address, port=guest.port, secret=guest.secret))
            peers.append(peer)
            say(f"{guest.host} has come: {len(fleets)} of {num_hosts} hosts")
        merged = decode(encode(merge(fleets, links, problems)), Fleet, "the fleet")  # as the others get it
        for peer in peers:
            with suppress(OSError):  # who has gone has no use for it
                _send(peer, merged)
    return merged


def join(
    fleet: Fleet,
    address: str,
    *,
    token: str,
    come_s: float = COME_S,
    knock_s: float = KNOCK_S,
    say: Say = print,
) -> Fleet:
    """The one fleet of the hosts that gather at `address` (HOST:PORT), after measuring the links to them.

    EnvironmentBrokenError where nobody answers within `knock_s` seconds, the token is refused, or the others
    do not come.
    """
    host, port = host_and_port(address)
    peer = _knock(host, port, address, time.monotonic() + knock_s, say)
    with peer, Waiter(secrets.token_hex(TOKEN_BYTES), host=peer.getsockname()[0]) as waiter:
        try:
            name = host_of(fleet)
            _send(peer, Guest(token=token, host=name, fleet=fleet, port=waiter.port, secret=waiter.token))
            welcome = _receive(peer, Welcome, come_s)
            if welcome.refusal:
                raise _broken(f"{address} refuses {name}: {welcome.refusal}")
            _send(peer, _measure(name, welcome.others, host, say))
            say("measured; waiting for the other hosts")
            return _receive(peer, Fleet, come_s + MEASURE_S)
        except (OSError, EOFError) as e:
            raise _broken(f"the host at {address} went away: {e or 'it hung up'}") from e


def _knock(host: str, port: int, address: str, end: float, say: Say) -> socket.socket:
    """A connection to the host that gathers, which may still be starting."""
    said = False
    while True:
        try:
            return socket.create_connection((host, port), DIAL_S)
        except OSError as e:
            if time.monotonic() >= end:
                raise _broken(f"nobody gathers at {address}: {e.strerror or e}") from e
            if not said:
                say(f"nobody gathers at {address} yet ({e.strerror or e}); trying again")
                said = True
            time.sleep(PAUSE_S)


def link_curve(latencies_s: Sequence[float], rates: Sequence[float]) -> Curve:
    """latency + bytes / rate from medians, with a spread that covers all rounds, at least 5 %.

    Example: 0.1 ms and 100 MB/s give 10.1 ms for 1 MB.
    """
    latency_s, bytes_per_s = median(latencies_s), median(rates)
    reach = max((max(x) - min(x)) / median(x) for x in (latencies_s, rates))
    points = ((0.0, latency_s), (1e9, latency_s + 1e9 / bytes_per_s))
    return Curve(points=points, source="measured", spread=max(0.05, reach))


def _let_in(
    peer: socket.socket, address: str, token: str, fleets: dict[str, Fleet], say: Say
) -> Guest | None:
    """The guest at the other end, `address`; None where it is refused, which both sides are told."""
    peer.settimeout(DIAL_S)
    try:
        guest = _receive(peer, Guest, DIAL_S)
        refusal = _refusal(guest, token, fleets)
        if not refusal:
            return guest
        _send(peer, Welcome(refusal=refusal))
    except (OSError, EOFError, EvenerError) as e:
        refusal = f"no host of evener ({type(e).__name__})"
    say(f"somebody at {address} was refused: {refusal}")
    return None


def _refusal(guest: Guest, token: str, fleets: dict[str, Fleet]) -> str:
    if not hmac.compare_digest(guest.token.encode(), token.encode()):
        return "the token is wrong"
    if {d.host for d in guest.fleet.devices} != {guest.host}:
        return "it names another host than its devices"
    if guest.host in fleets:
        return f"a host {guest.host} is here already: evener probe --host NAME"
    return ""


def _measure(name: str, others: Sequence[Known], joined: str, say: Say) -> Measured:
    links, problems = [], []
    for other in others[:MOST_HOSTS]:
        address = other.address or joined
        say(f"measuring the link to {other.host}")
        latencies, rates = [], []
        error = ""
        for _ in range(ROUNDS):
            seen = look(address, other.port, other.secret, timeout_s=DIAL_S)
            fast = rate(address, other.port, other.secret, seconds=RATE_S, timeout_s=DIAL_S)
            error = error or seen.error or fast.error
            if seen.latency_s and fast.bytes_per_s and not error:
                latencies.append(seen.latency_s)
                rates.append(fast.bytes_per_s)
        if error or not rates:
            problems.append(f"the link from {name} to {other.host} could not be measured: {error}")
            continue
        links.append(Link(a=other.host, b=name, curve=link_curve(latencies, rates)))
    return Measured(links=tuple(links), problems=tuple(problems))


def _bound_to(listener: socket.socket) -> str:
    return str(listener.getsockname()[0])


def _broken(what: str) -> EnvironmentBrokenError:
    return EnvironmentBrokenError(
        what,
        remedy="start evener probe --gather on one host first, then --join its HOST:PORT with the token that "
        "it prints in EVENER_TOKEN; or probe each host alone and put the files together with --merge",
    )


def _send(peer: socket.socket, value: object) -> None:
    raw = encode(value)
    peer.sendall(_HEAD.pack(len(raw)) + raw)


def _receive(peer: socket.socket, shape: type[T], within_s: float) -> T:
    end = time.monotonic() + within_s
    size = _HEAD.unpack(_exactly(peer, _HEAD.size, end))[0]
    if size > MOST_BYTES:
        raise UsageError(f"a message of {size} bytes is more than any fleet needs")
    return decode(_exactly(peer, size, end), shape, "what the other host says")


def _exactly(peer: socket.socket, num_bytes: int, end: float) -> bytes:
    parts = []
    while num_bytes:
        peer.settimeout(max(0.01, end - time.monotonic()))
        part = peer.recv(min(num_bytes, 2**18))
        if not part:
            raise EOFError
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
