"""Before a job: every pair of its processes is tried with real data, and the way that each takes is decided.

1  each tells where it stands and waits for the others                       until all are there
2  each dials every address of every other process, all at once              3 s
3  one process of each host measures the rates, no host in two at a time     4 s in all
4  the first process decides (core/ways.py) and tells all                    10 s from 1 to here
"""

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from msgspec.structs import replace

from evener.core.figures import Value
from evener.core.files import decode, encode
from evener.core.ways import SHOWN_VARIABLES, Attempt, PeerCopy, Spot, Verdict, decide, peer_variables
from evener.errors import PeerLostError
from evener.probing.network import interfaces, route
from evener.probing.trial import Waiter, look, rate

T = TypeVar("T")
COME_S = 60.0
LOOK_S = 3.0
RATES_S = 4.0
RATE_S = (0.15, 1.2)
"""At least and at most so many seconds for one rate."""
COPIES_S = 7.0
"""So long copies between accelerators may take, which load torch in a process of their own."""
_SPARE_S = 1.5
_MOST_VALUE = 4096
_MOST_BYTES = 2**22


class Board:
    """What the processes of a preflight tell each other, in the job's store: JSON, bounded and checked."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def put(self, key: str, value: object) -> None:
        self._store.set(key, encode(value))  # type: ignore[arg-type]  # bytes are taken

    def get(self, key: str, shape: type[T], seconds: float) -> T | None:
        """What was put under `key`; None where nobody put it within `seconds`."""
        try:
            self._store.wait([key], timedelta(seconds=max(seconds, 0.01)))
            raw = self._store.get(key)
        except (dist.DistStoreError, RuntimeError):
            return None
        return decode(raw[:_MOST_BYTES], shape, f"the preflight's {key}")


class Here(Value, frozen=True, kw_only=True):
    """A process's place and the secret by which the others are known to it."""

    spot: Spot
    token: str


class Copies(Value, frozen=True, kw_only=True):
    """Copies between the accelerators of one host; `trouble` says why some were not tried."""

    found: tuple[PeerCopy, ...] = ()
    trouble: str = ""


class Tried(Value, frozen=True, kw_only=True):
    """What one process found when it dialled the others, and how its host's accelerators reach each other."""

    attempts: tuple[Attempt, ...]
    copies: Copies = Copies()


class Order(Value, frozen=True, kw_only=True):
    """One rate to measure: the attempt to repeat, and in which round."""

    turn: int
    attempt: Attempt


class Orders(Value, frozen=True, kw_only=True):
    """The rates of a preflight, `seconds` for each; `left_out` had no time."""

    seconds: float
    orders: tuple[Order, ...]
    left_out: int = 0


@dataclass(frozen=True, kw_only=True)
class Party:
    """Who takes part: names of the processes in order, which of them this is, and where they meet."""

    names: tuple[str, ...]
    number: int
    host: str
    board: Board
    meeting_place: str = ""

    @property
    def name(self) -> str:
        return self.names[self.number]

    @property
    def leads(self) -> bool:
        return self.number == 0


def preflight(
    party: Party,
    *,
    environment: Mapping[str, str] = os.environ,
    copies: Callable[[], tuple[tuple[PeerCopy, ...], str]] | None = None,
    come_s: float = COME_S,
    clock: Callable[[], float] = time.monotonic,
) -> Verdict:
    """Try every pair with real data and decide the ways; every process of the party calls this.

    Takes at most 10 s from when all are there. A pair that fails or whose data arrives changed is `dead` in
    the verdict, with what was tried. `copies` tries the accelerators of this host; the first process of each
    host calls it. PeerLostError names processes that do not come within `come_s`, or that stop answering.
    Nothing is set: `Verdict.variables` says what should be.
    """
    token = secrets.token_hex(16)
    with Waiter(token) as waiter:
        spot = spot_here(party, waiter.port, environment)
        party.board.put(f"here/{party.number}", Here(spot=spot, token=token))
        everyone = _seen(_all(party, "here", Here, come_s, "came"))
        begin = clock()
        others = [h for h in everyone if h.spot.process != party.name]
        first = next(h for h in everyone if h.spot.host == party.host).spot.process == party.name
        copying = _started(copies) if copies and first else None
        spot = everyone[party.number].spot
        party.board.put(f"tried/{party.number}", Tried(attempts=_look_at(party.name, spot, others)))
        if party.leads:
            tried = _all(party, "tried", Tried, LOOK_S + _SPARE_S, "answered")
            attempts = [a for t in tried for a in t.attempts]
            party.board.put("orders", orders_for([h.spot for h in everyone], attempts))
        orders = _one(party, "orders", Orders, LOOK_S + 2 * _SPARE_S)
        rates = _measured(party, orders, {h.spot.process: h for h in everyone})
        party.board.put(f"rates/{party.number}", replace(rates, copies=copying() if copying else Copies()))
        if party.leads:
            told = _all(party, "rates", Tried, COPIES_S + _SPARE_S, "measured")
            spots = [h.spot for h in everyone]
            verdict = decide(spots, with_rates(spots, attempts, [a for t in told for a in t.attempts]))
            verdict = _with_copies(verdict, spots, [t.copies for t in told])
            notes = (*verdict.notes, *_left_out(orders))
            party.board.put("verdict", replace(verdict, notes=notes, seconds=clock() - begin))
        verdict = _one(party, "verdict", Verdict, COPIES_S + 2 * _SPARE_S)
        party.board.put(f"done/{party.number}", True)
        if party.leads:  # the store may end with this process
            _all(party, "done", bool, _SPARE_S, "left", strict=False)
        return verdict


def spot_here(party: Party, port: int, environment: Mapping[str, str]) -> Spot:
    """This process's place: its interfaces, and the one by which it reaches the meeting place."""
    here = interfaces()
    way = str(route(party.meeting_place).get("address", "")) if party.meeting_place else ""
    by = next((i.name for i in here if way in i.addresses), "")
    shown = {n: v[:_MOST_VALUE] for n, v in environment.items() if n.startswith(SHOWN_VARIABLES)}
    return Spot(process=party.name, host=party.host, port=port, interfaces=here, route=by, environment=shown)


def _seen(everyone: list[Here]) -> list[Here]:
    """Everyone, knowing whether all are on one host."""
    if len({h.spot.host for h in everyone}) > 1:
        return everyone
    return [replace(h, spot=replace(h.spot, within=True)) for h in everyone]


def _all(
    party: Party, what: str, shape: type[T], seconds: float, verb: str, *, strict: bool = True
) -> list[T]:
    """What every process told; PeerLostError names those that did not in time."""
    end = time.monotonic() + seconds
    found = [party.board.get(f"{what}/{i}", shape, end - time.monotonic()) for i in range(len(party.names))]
    missing = [n for n, value in zip(party.names, found, strict=True) if value is None]
    if missing and strict:
        raise PeerLostError(
            f"{', '.join(missing)} of the job never {verb}",
            numbers=f"waited {seconds:g} s; {len(party.names) - len(missing)} of {len(party.names)} did",
            remedy="look for the first error there; is the meeting place reached from there?",
        )
    return [value for value in found if value is not None]


def _one(party: Party, what: str, shape: type[T], seconds: float) -> T:
    found = party.board.get(what, shape, seconds)
    if found is None:
        raise PeerLostError(
            f"{party.names[0]}, which leads, did not tell the preflight's {what}",
            numbers=f"waited {seconds:g} s",
            remedy=f"look for the first error of {party.names[0]}",
        )
    return found


def _look_at(here: str, spot: Spot, others: Sequence[Here]) -> tuple[Attempt, ...]:
    """Every address of every other process, dialled at once."""
    own = {address: i.name for i in spot.interfaces for address in i.addresses}
    doors = [(h, name, address) for h in others for name, address in h.spot.doors.items()]
    if not doors:
        return ()

    def one(door: tuple[Here, str, str]) -> Attempt:
        peer, interface, address = door
        found = look(address, peer.spot.port, peer.token, timeout_s=LOOK_S)
        return Attempt(
            source=here,
            target=peer.spot.process,
            interface=interface,
            address=address,
            by=own.get(found.by, ""),
            latency_s=found.latency_s,
            error=found.error,
        )

    with ThreadPoolExecutor(max_workers=min(64, len(doors))) as pool:
        return tuple(pool.map(one, doors))


def orders_for(spots: Sequence[Spot], attempts: Sequence[Attempt]) -> Orders:
    """Which rates to measure: from one process of each host to one of each other, each way that went well.

    No host is in two at a time. Example: two hosts with two networks: four rates, one after the other.
    """
    host = {s.process: s.host for s in spots}
    wanted: dict[tuple[str, str, str], Attempt] = {}
    for a in attempts:
        if not a.error and host[a.source] != host[a.target]:
            wanted.setdefault((host[a.source], host[a.target], a.interface), a)
    turns: list[set[str]] = []
    placed = []
    for (source, target, _), attempt in wanted.items():
        turn = next((i for i, busy in enumerate(turns) if not busy & {source, target}), len(turns))
        if turn == len(turns):
            turns.append(set())
        turns[turn] |= {source, target}
        placed.append(Order(turn=turn, attempt=attempt))
    least, most = RATE_S
    seconds = max(least, min(most, RATES_S / max(len(turns), 1) - 0.05))
    in_time = int(RATES_S / (seconds + 0.05))
    kept = tuple(o for o in placed if o.turn < in_time)
    return Orders(seconds=seconds, orders=kept, left_out=len(placed) - len(kept))


def _measured(party: Party, orders: Orders, peers: Mapping[str, Here]) -> Tried:
    """The rates that are this process's to measure, each in its turn."""
    begin = time.monotonic()
    found = []
    for order in sorted(orders.orders, key=lambda o: o.turn):
        attempt = order.attempt
        if attempt.source != party.name:
            continue
        wait = begin + order.turn * (orders.seconds + 0.05) - time.monotonic()
        time.sleep(max(wait, 0.0))
        peer = peers[attempt.target]
        seen = rate(attempt.address, peer.spot.port, peer.token, seconds=orders.seconds, timeout_s=_SPARE_S)
        found.append(replace(attempt, bytes_per_s=seen.bytes_per_s, error=seen.error))
    return Tried(attempts=tuple(found))


def with_rates(
    spots: Sequence[Spot], attempts: Sequence[Attempt], measured: Sequence[Attempt]
) -> tuple[Attempt, ...]:
    """The attempts with the rate of their hosts and interface; one that failed under load has failed."""
    host = {s.process: s.host for s in spots}
    rates = {(host[a.source], host[a.target], a.interface): a for a in measured}
    found = []
    for a in attempts:
        seen = rates.get((host[a.source], host[a.target], a.interface))
        if seen is not None and not a.error:
            a = replace(a, bytes_per_s=seen.bytes_per_s, error=seen.error)
        found.append(a)
    return tuple(found)


def _started(copies: Callable[[], tuple[tuple[PeerCopy, ...], str]]) -> Callable[[], Copies]:
    """Begin to try the accelerators; the result, once it is asked for, no later than a rate may take."""
    begin = time.monotonic()
    pool = ThreadPoolExecutor(max_workers=1)
    work = pool.submit(copies)
    pool.shutdown(wait=False)

    def result() -> Copies:
        try:
            found, trouble = work.result(timeout=max(begin + COPIES_S - time.monotonic(), 0.0))
        except TimeoutError:
            return Copies(trouble=f"copies between accelerators did not end within {COPIES_S:g} s")
        return Copies(found=found, trouble=trouble)

    return result


def _with_copies(verdict: Verdict, spots: Sequence[Spot], told: Sequence[Copies]) -> Verdict:
    """The verdict with what the copies of each host ask for, for all processes of that host."""
    variables = dict(verdict.variables)
    notes = list(verdict.notes)
    for spot, copies in zip(spots, told, strict=True):
        wanted, said = peer_variables(copies.found, spot.environment)
        notes += [*said, *([copies.trouble] if copies.trouble else [])]
        for other in spots:
            if other.host == spot.host and wanted:
                variables[other.process] = {**variables[other.process], **wanted}
    return replace(verdict, variables=variables, notes=tuple(notes))


def _left_out(orders: Orders) -> list[str]:
    if not orders.left_out:
        return []
    return [f"{orders.left_out} rates were not measured: there was no time for them within {RATES_S:g} s"]


def names_of(board: Board, number: int, count: int, name: str, *, come_s: float = COME_S) -> tuple[str, ...]:
    """The names of all processes in order, for those that only know how many there are.

    PeerLostError names the numbers that do not come within `come_s`.
    """
    board.put(f"name/{number}", name)
    end = time.monotonic() + come_s
    found = [board.get(f"name/{i}", str, end - time.monotonic()) for i in range(count)]
    missing = [f"process {i}" for i, value in enumerate(found) if value is None]
    if missing:
        raise PeerLostError(
            f"{', '.join(missing)} of the preflight never came",
            numbers=f"waited {come_s:g} s; {count - len(missing)} of {count} came",
            remedy="start it there; the meeting place must be an address that it reaches",
        )
    return tuple(f"{n}/{i}" if found.count(n) > 1 else str(n) for i, n in enumerate(found))
