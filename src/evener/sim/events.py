"""The event simulator: devices, wires and reductions as things that happen one after another.

Written apart from the topological pass, against which it is tested: it keeps a queue of moments, not a
formula, and so can hold what a formula cannot: shared buses, slow spells, cuts, and memory over time.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from evener.core.actions import Action, Schedule, of_micro_batch
from evener.core.routes import Routes
from evener.errors import ScheduleError
from evener.schedules.costs import Costs
from evener.schedules.timing import Moment, Times
from evener.sim.windows import Windows
from evener.sim.wires import Message, Wires

_COMPUTE = ("F", "B", "I", "W")


@dataclass(kw_only=True)
class _Device:
    name: str
    row: tuple[Action, ...]
    at: int = 0
    since_s: float = 0.0
    is_busy: bool = True
    moments: list[Moment] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)


@dataclass(kw_only=True)
class _Piece:
    """One part of a reduction: it goes when its holders are ready and it heads every device's queue."""

    devices: tuple[str, ...]
    waiting: int
    seconds: float


class EventSimulator:
    """Plays one step of `schedule`, from the barrier at `begin_s` to the next."""

    def __init__(
        self,
        schedule: Schedule,
        routes: Routes,
        costs: Costs,
        begin_s: float = 0.0,
        windows: Windows | None = None,
    ) -> None:
        self.routes, self.costs, self.windows = routes, costs, windows or Windows()
        self._begin_s = begin_s
        self._leads = {name: self._lead(name) for name in schedule.actions}
        self._devices = {
            name: _Device(name=name, row=row, since_s=self._leads[name][1])
            for name, row in schedule.actions.items()
        }
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._tick = count()
        self._wires = Wires(self.windows, self._call)
        self._arrived: dict[tuple[str, Action], list[tuple[float, float]]] = {}
        self._finished: set[tuple[str, Action]] = set()
        self._streams: dict[str, deque[_Piece]] = {name: deque() for name in self._devices}
        self._pieces_of: dict[tuple[int, str], list[tuple[float, _Piece]]] = {}
        for reduction in costs.reductions:
            for seconds, readies in reduction.pieces:
                piece = _Piece(devices=reduction.devices, waiting=len(reduction.holders), seconds=seconds)
                for name in reduction.devices:
                    self._streams[name].append(piece)
                for holder, ready in zip(reduction.holders, readies, strict=True):
                    self._pieces_of.setdefault(holder, []).append((ready, piece))
        self._at_step: set[str] = set()
        self._barrier_s: float | None = None

    @property
    def memory(self) -> dict[str, tuple[tuple[float, float], ...]]:
        """(second, bytes in use from then on) by device, for devices whose memory the costs know."""
        return {d.name: tuple(d.memory) for d in self._devices.values() if d.memory}

    def run(self) -> Times:
        """All moments; ScheduleError when some device waits for ever."""
        for device in self._devices.values():
            memory = self.costs.memory.get(device.name)
            if memory:
                device.memory.append((device.since_s, memory.fixed_bytes))
            self._call(device.since_s, partial(self._wake, device))
        while self._heap:
            now, _, action = heapq.heappop(self._heap)
            action(now)
        if self._barrier_s is None:
            stuck = [d for d in self._devices.values() if d.name not in self._at_step]
            raise ScheduleError(
                "the schedule deadlocks",
                numbers="; ".join(f"{d.name} waits at {d.row[d.at]}" for d in stuck if d.at < len(d.row)),
                remedy="sends before the receives that need them, in every row",
            )
        return Times(
            moments={d.name: d.moments for d in self._devices.values()},
            leads=self._leads,
            barrier_s=self._barrier_s,
        )

    def _lead(self, name: str) -> tuple[float, float]:
        """When `name` is through with the optimiser's step of the round before, and with its overhead."""
        optimizer_s, overhead_s = self.costs.lead_s(name)
        end_s = self.windows.compute_end_s(name, self._begin_s, optimizer_s)
        return end_s, self.windows.compute_end_s(name, end_s, overhead_s)

    def _call(self, when_s: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (when_s, next(self._tick), action))

    def _wake(self, device: _Device, now: float) -> None:
        """The optimiser's step of the round before is done; what arrived until now has waited."""
        device.is_busy = False
        self._go_on(device, now)

    def _go_on(self, device: _Device, now: float) -> None:
        """Do actions until one takes time, cannot start yet, or is the STEP."""
        while not device.is_busy and device.at < len(device.row):
            action = device.row[device.at]
            if action.type == "STEP":
                if device.name not in self._at_step:
                    self._at_step.add(device.name)
                    self._try_step(now)
                return
            if action.type in _COMPUTE:
                if self._can_compute(device.name, action):
                    self._begin(device, action, now)
                return
            sent_s = 0.0
            if action.type.startswith("RECV"):
                arrivals = self._arrived.get((device.name, action), [])
                if len(arrivals) < self._expected(device.name, action):
                    return
                sent_s = max(arrivals)[1]
            elif action.type.startswith("SEND"):
                self._send(device.name, action, now)
            elif not self._launches_early(device, device.at):
                for _, piece in self._pieces_of.get((action.stage or 0, device.name), []):
                    self._ready(piece, now)
            self._note(device, action, now, sent_s)

    def _note(self, device: _Device, action: Action, end_s: float, sent_s: float = 0.0) -> None:
        moment = Moment(action=action, start_s=device.since_s, end_s=end_s, sent_s=sent_s)
        device.moments.append(moment)
        device.since_s = end_s
        device.at += 1

    def _can_compute(self, name: str, action: Action) -> bool:
        """What an action needs on its own device; what comes from others has been received before it."""
        stage, m, kind = action.stage or 0, action.micro_batch or 0, action.type
        if kind == "W":
            return (name, of_micro_batch("I", stage, m)) in self._finished
        if kind != "F" and (name, of_micro_batch("F", stage, m)) not in self._finished:
            return False
        for other in self._pieces(stage, m, kind == "F"):
            if other.source == other.target == name:
                neighbour = stage - 1 if kind == "F" else stage + 1
                made = [of_micro_batch(k, neighbour, m) for k in ("F" if kind == "F" else "BI")]
                if not any((name, a) in self._finished for a in made):
                    return False
        return True

    def _pieces(self, stage: int, m: int, is_forward: bool):
        """What comes into `stage` with its forward or backward."""
        if is_forward:
            return self.routes.forward_pieces(stage - 1, m) if not self.routes.stages[stage].is_first else ()
        return self.routes.backward_pieces(stage + 1, m) if not self.routes.stages[stage].is_last else ()

    def _expected(self, name: str, action: Action) -> int:
        pieces = self._pieces(action.stage or 0, action.micro_batch or 0, action.type == "RECV_F")
        return sum(p.target == name and p.source != name for p in pieces)

    def _begin(self, device: _Device, action: Action, now: float) -> None:
        stage, m = action.stage or 0, action.micro_batch or 0
        samples = self.routes.samples(stage, device.name, m)
        seconds = self.costs.action_s(stage, device.name, action.type, samples, m)
        end_s = self.windows.compute_end_s(device.name, now, seconds)
        device.is_busy = True
        if action.type == "F":
            self._hold(device, stage, samples, now)
        for at in range(device.at + 1, len(device.row)):
            if device.row[at].type in _COMPUTE:
                break
            if device.row[at].type == "REDUCE_GRAD" and self._launches_early(device, at):
                for ready, piece in self._pieces_of.get((device.row[at].stage or 0, device.name), []):
                    when = end_s - (1 - ready) * (end_s - now)
                    self._call(when, partial(self._ready, piece))

        def done(then: float) -> None:
            device.is_busy = False
            self._finished.add((device.name, action))
            if action.type in ("B", "W"):
                self._hold(device, stage, -samples, then)
            self._note(device, action, then)
            self._go_on(device, then)

        self._call(end_s, done)

    def _launches_early(self, device: _Device, at: int) -> bool:
        """Whether the reduction at `at` follows its stage's last backward with no other compute between."""
        before = [a for a in device.row[:at] if a.type in _COMPUTE]
        return bool(before) and before[-1].stage == device.row[at].stage and before[-1].type in ("B", "W")

    def _hold(self, device: _Device, stage: int, samples: int, now: float) -> None:
        memory = self.costs.memory.get(device.name)
        if memory:
            held = device.memory[-1][1] + memory.saved_bytes.get(stage, 0.0) * samples
            device.memory.append((now, held))

    def _send(self, name: str, action: Action, now: float) -> None:
        stage, m = action.stage or 0, action.micro_batch or 0
        is_forward = action.type == "SEND_F"
        target = stage + 1 if is_forward else stage - 1
        pieces = self.routes.forward_pieces if is_forward else self.routes.backward_pieces
        per_sample = self.costs.output_bytes.get(stage if is_forward else target, 0.0)
        kind = "RECV_F" if is_forward else "RECV_B"
        receive = of_micro_batch(kind, target, m)
        for piece in pieces(stage, m):
            if piece.source == name and piece.target != name:
                wire = self.costs.wire(name, piece.target)
                peer = self._devices[piece.target]

                def arrived(then: float, peer: _Device = peer) -> None:
                    self._arrived.setdefault((peer.name, receive), []).append((then, now))
                    self._go_on(peer, then)

                message = Message(
                    source=name, target=piece.target, left_s=0.0, latency_s=wire.latency_s, arrived=arrived
                )
                self._wires.send(now, wire, per_sample * piece.samples, message)

    def _ready(self, piece: _Piece, now: float) -> None:
        piece.waiting -= 1
        self._try_reduce(piece, now)

    def _try_reduce(self, piece: _Piece, now: float) -> None:
        if piece.waiting or any(self._streams[d][0] is not piece for d in piece.devices):
            return
        piece.waiting = -1  # under way

        def done(then: float) -> None:
            for name in piece.devices:
                self._streams[name].popleft()
            for name in piece.devices:
                if self._streams[name]:
                    self._try_reduce(self._streams[name][0], then)
            self._try_step(then)

        self._call(self.windows.transfer_end_s(piece.devices, now, piece.seconds), done)

    def _try_step(self, now: float) -> None:
        if len(self._at_step) < len(self._devices) or any(self._streams.values()):
            return
        self._barrier_s = now
        for device in self._devices.values():
            self._note(device, device.row[device.at], now)
