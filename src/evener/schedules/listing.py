"""List scheduling: whenever a device is free it takes the most urgent thing that is ready.

Each device has threads, lists of steps whose order is fixed; only their heads compete. Merging several
stages' fixed orders on one device and the search of `unequal` are both this loop, with other threads and
urgencies.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from evener.core.routes import Routes
from evener.errors import ScheduleError
from evener.schedules.costs import Costs


class Step(NamedTuple):
    """One compute action of some device: kind is "F", "B", "I" or "W"."""

    kind: str
    stage: int
    micro_batch: int


Threads = Mapping[str, Sequence[Sequence[Step]]]
Rows = dict[str, list[Step]]
Urgency = Callable[[str, Step], tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What may be in flight: micro-batches by stage, and bytes by device (`room`, what is left for them).

    `saved_bytes` are per sample of a stage, `whole_bytes` what a micro-batch takes in all stages of a device.
    """

    in_flight: Mapping[int, int] = field(default_factory=dict)
    room: Mapping[str, float] = field(default_factory=dict)
    saved_bytes: Mapping[tuple[str, int], float] = field(default_factory=dict)
    whole_bytes: Mapping[str, float] = field(default_factory=dict)


class ListScheduler:
    """Runs `threads` once; `rows` and `makespan_s` hold the result. ScheduleError when a device is stuck.

    Room for one whole micro-batch is kept on each device for the oldest unfinished one: so the oldest always
    gets through, and memory cannot deadlock.
    """

    def __init__(
        self, routes: Routes, costs: Costs, threads: Threads, urgency: Urgency, limits: Limits | None = None
    ) -> None:
        self.routes, self.costs, self.urgency = routes, costs, urgency
        self.limits = limits or Limits()
        self.threads = {device: [list(t) for t in rows] for device, rows in threads.items()}
        self.heads = {device: [0] * len(rows) for device, rows in threads.items()}
        self.rows: Rows = {device: [] for device in threads}
        self.makespan_s = 0.0
        self._missing: dict[tuple[str, int, int, bool], int] = {}
        self._done: set[tuple[str, Step]] = set()
        self._events: list[tuple[float, int, str, Step | None, tuple | None]] = []
        self._tick = count()
        self._busy: dict[str, bool] = dict.fromkeys(threads, False)
        self._wire_free: dict[tuple[str, str], float] = {}
        self._flying: dict[tuple[str, int], int] = {}
        self._used: dict[str, float] = dict.fromkeys(threads, 0.0)
        self._used_by: dict[tuple[str, int, int], float] = {}
        self._left: dict[tuple[int, int], int] = {}
        self._expect()

    def run(self) -> "ListScheduler":
        """Play the whole step."""
        self._offer(self.threads)
        while self._events:
            now = self._events[0][0]
            touched: dict[str, None] = {}
            while self._events and self._events[0][0] == now:
                _, _, device, step, arrived = heapq.heappop(self._events)
                touched[device] = None
                if step is not None and self._finish(device, step, now):
                    touched.update(dict.fromkeys(self.threads))
                if arrived is not None:
                    self._missing[arrived] -= 1
            self._offer(touched, now)
        stuck = [d for d, rows in self.threads.items() if any(map(len, self._rest(d)))]
        if stuck:
            heads = [f"{d} at {', '.join(_spell(t[0]) for t in self._rest(d) if t)}" for d in stuck]
            raise ScheduleError(
                "the given orders wait for one another", numbers="; ".join(heads), remedy="another order"
            )
        return self

    def _rest(self, device: str) -> list[list[Step]]:
        return [t[i:] for t, i in zip(self.threads[device], self.heads[device], strict=True)]

    def _expect(self) -> None:
        """How many pieces each action waits for, and how much each micro-batch has left to do."""
        for route in self.routes.stages:
            for m in range(len(route.sizes)):
                for piece in self.routes.forward_pieces(route.number, m):
                    key = (piece.target, route.number + 1, m, True)
                    self._missing[key] = self._missing.get(key, 0) + 1
                for piece in self.routes.backward_pieces(route.number, m):
                    key = (piece.target, route.number - 1, m, False)
                    self._missing[key] = self._missing.get(key, 0) + 1
        for threads in self.threads.values():
            for thread in threads:
                for step in thread:
                    key2 = (step.micro_batch, self.routes.stages[step.stage].pipeline)
                    self._left[key2] = self._left.get(key2, 0) + 1
        self._ages = sorted(self._left)

    def _offer(self, devices, now: float = 0.0) -> None:
        for device in devices:
            if not self._busy[device]:
                best = self._best(device)
                if best is not None:
                    self._start(device, best, now)

    def _best(self, device: str) -> int | None:
        chosen, least = None, None
        for i, (thread, head) in enumerate(zip(self.threads[device], self.heads[device], strict=True)):
            if head < len(thread) and self._ready(device, thread[head]):
                urgency = self.urgency(device, thread[head])
                if least is None or urgency < least:
                    chosen, least = i, urgency
        return chosen

    def _ready(self, device: str, step: Step) -> bool:
        kind, stage, m = step
        if kind == "F":
            return self._missing.get((device, stage, m, True), 0) == 0 and self._has_room(device, step)
        if kind == "W":
            return (device, Step("I", stage, m)) in self._done
        return (
            self._missing.get((device, stage, m, False), 0) == 0
            and (device, Step("F", stage, m)) in self._done
        )

    def _has_room(self, device: str, step: Step) -> bool:
        limits, (_, stage, m) = self.limits, step
        most = limits.in_flight.get(stage)
        if most is not None and self._flying.get((device, stage), 0) >= most:
            return False
        room = limits.room.get(device)
        if room is None:
            return True
        need = self._used[device] + self._bytes(device, stage, m)
        oldest = self._ages[0]
        if oldest != (m, self.routes.stages[stage].pipeline):
            need += limits.whole_bytes[device] - self._used_by.get((device, *oldest), 0.0)
        return need <= room * (1 + 1e-12)

    def _bytes(self, device: str, stage: int, m: int) -> float:
        per_sample = self.limits.saved_bytes.get((device, stage), 0.0)
        return per_sample * self.routes.samples(stage, device, m) if per_sample else 0.0

    def _hold(self, device: str, step: Step, sign: int) -> None:
        held = sign * self._bytes(device, step.stage, step.micro_batch)
        key = (device, step.micro_batch, self.routes.stages[step.stage].pipeline)
        self._used[device] += held
        self._used_by[key] = self._used_by.get(key, 0.0) + held

    def _start(self, device: str, thread: int, now: float) -> None:
        step = self.threads[device][thread][self.heads[device][thread]]
        self.heads[device][thread] += 1
        self.rows[device].append(step)
        self._busy[device] = True
        if step.kind == "F":
            self._flying[device, step.stage] = self._flying.get((device, step.stage), 0) + 1
            self._hold(device, step, 1)
        samples = self.routes.samples(step.stage, device, step.micro_batch)
        end = now + self.costs.action_s(step.stage, device, step.kind, samples)
        heapq.heappush(self._events, (end, next(self._tick), device, step, None))

    def _finish(self, device: str, step: Step, now: float) -> bool:
        """Hand on what the step made; True when another micro-batch is now the oldest."""
        kind, stage, m = step
        self._busy[device] = False
        self._done.add((device, step))
        self.makespan_s = now
        if kind == "F":
            self._send(device, stage, stage + 1, m, now)
        elif kind != "W":
            self._send(device, stage, stage - 1, m, now)
        if kind in "BW":
            self._flying[device, stage] -= 1
            self._hold(device, step, -1)
        age = (m, self.routes.stages[stage].pipeline)
        self._left[age] -= 1
        moved = False
        while self._ages and not self._left[self._ages[0]]:
            del self._ages[0]
            moved = True
        return moved

    def _send(self, device: str, stage: int, target: int, m: int, now: float) -> None:
        forward = target > stage
        pieces = self.routes.forward_pieces if forward else self.routes.backward_pieces
        for piece in pieces(stage, m):
            if piece.source != device:
                continue
            key = (piece.target, target, m, forward)
            if piece.target == device:
                self._missing[key] -= 1
                continue
            wire = self.costs.wire(device, piece.target)
            per_sample = self.costs.output_bytes.get(min(stage, target), 0.0)
            free = max(now, self._wire_free.get((device, piece.target), 0.0))
            free += wire.occupied_s(per_sample * piece.samples)
            self._wire_free[device, piece.target] = free
            arrival = free + wire.latency_s
            heapq.heappush(self._events, (arrival, next(self._tick), piece.target, None, key))


def _spell(step: Step) -> str:
    return f"{step.stage}{step.kind}{step.micro_batch}"
