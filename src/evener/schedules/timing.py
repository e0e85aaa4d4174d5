"""The topological pass: when each action starts and ends, by going through the rows once.

A device's next action starts when the one before has ended and what it needs is there. With t the row's
clock:

    F, B, I, W   t ← t + seconds
    SEND         the wire to the peer is taken from max(t, its last end); the message arrives a latency
    after that RECV         t ← max(t, arrival of the last piece)
    STEP         t ← max over all devices and reductions: the barrier

A step lasts from one barrier to the next, which is what repeats: at its start each device takes the
optimiser's step of the round before (agreement, update, overhead), so that a quick one is ahead of a slow
one by that much. Pairs of devices do not share links here (the event simulator does that), so each
message's time is known when it is sent and one pass suffices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from evener.core.actions import Action, Schedule
from evener.core.routes import Routes
from evener.errors import ScheduleError
from evener.schedules.costs import Costs
from evener.schedules.lowering import incoming


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One action in time. For a RECV, `sent_s` is when the last piece to arrive left its maker."""

    action: Action
    start_s: float
    end_s: float
    sent_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Times:
    """All moments by device from the last barrier on; `barrier_s` is the next: every gradient is summed.

    `leads` holds when each device ended its optimiser's step and its overhead.
    """

    moments: dict[str, list[Moment]]
    leads: dict[str, tuple[float, float]]
    barrier_s: float

    def shifted(self, by_s: float) -> "Times":
        """The same, `by_s` seconds later."""
        return Times(
            moments={
                d: [
                    Moment(
                        action=m.action,
                        start_s=m.start_s + by_s,
                        end_s=m.end_s + by_s,
                        sent_s=m.sent_s + by_s,
                    )
                    for m in row
                ]
                for d, row in self.moments.items()
            },
            leads={d: (a + by_s, b + by_s) for d, (a, b) in self.leads.items()},
            barrier_s=self.barrier_s + by_s,
        )


_Key = tuple[str, int, int, str]  # device, stage, micro-batch, "F" or "B" (or "W")


@dataclass(kw_only=True)
class _Inbox:
    """What a RECV waits for: pieces not yet sent, and (arrival, sent) of the last to arrive."""

    missing: int
    last: tuple[float, float] = (0.0, 0.0)
    reader: str | None = None


@dataclass(kw_only=True)
class _Row:
    device: str
    actions: Sequence[Action]
    at: int = 0
    clock_s: float = 0.0
    moments: list[Moment] = field(default_factory=list)


class Pass:
    """One run through `schedule`. With `costs` absent nothing takes time: only the order is checked."""

    def __init__(self, schedule: Schedule, routes: Routes, costs: Costs | None) -> None:
        self.routes, self.costs = routes, costs
        self.leads = {d: _lead(costs, d) for d in schedule.actions}
        self.rows = {
            d: _Row(device=d, actions=row, clock_s=self.leads[d][1]) for d, row in schedule.actions.items()
        }
        self._inboxes: dict[_Key, _Inbox] = {}
        self._done: set[_Key] = set()
        self._wire_free: dict[tuple[str, str], float] = {}
        self._issued: dict[tuple[int, str], tuple[float, float]] = {}
        self._last_backward: dict[tuple[int, str], Moment] = {}
        self._last_compute: dict[str, Moment] = {}

    def run(self) -> Times:
        """All moments; ScheduleError names who waits for what when the rows deadlock."""
        runnable = list(self.rows)
        while runnable:
            runnable += self._advance(self.rows[runnable.pop()])
        stuck = [r for r in self.rows.values() if r.at < len(r.actions) and r.actions[r.at].type != "STEP"]
        if stuck:
            raise ScheduleError(
                "the schedule deadlocks",
                numbers="; ".join(f"{r.device} waits at {r.actions[r.at]}" for r in stuck),
                remedy="sends before the receives that need them, in every row",
            )
        return self._finish()

    def _advance(self, row: _Row) -> list[str]:
        """Run `row` as far as it goes; the devices that it unblocked."""
        woken: list[str] = []
        while row.at < len(row.actions):
            action = row.actions[row.at]
            if action.type == "STEP":
                break
            start, sent = row.clock_s, 0.0
            stage, m, way = action.stage or 0, action.micro_batch or 0, action.type[-1]
            if action.type in ("F", "B", "I", "W"):
                if not self._compute(row, action.type, stage, m):
                    break
            elif action.type.startswith("SEND"):
                woken += self._send(row, stage, m, way)
            elif action.type.startswith("RECV"):
                inbox = self._inbox((row.device, stage, m, way))
                if inbox.missing:
                    inbox.reader = row.device
                    break
                row.clock_s, sent = max(row.clock_s, inbox.last[0]), inbox.last[1]
            else:
                self._issue(row, stage)
            moment = Moment(action=action, start_s=start, end_s=row.clock_s, sent_s=sent)
            row.moments.append(moment)
            if action.type in ("F", "B", "I", "W"):
                self._last_compute[row.device] = moment
                if action.type in ("B", "W"):
                    self._last_backward[stage, row.device] = moment
            row.at += 1
        return woken

    def _inbox(self, key: _Key) -> _Inbox:
        if key not in self._inboxes:
            device, stage, m, way = key
            pieces = incoming(self.routes, stage, m, way)
            self._inboxes[key] = _Inbox(missing=sum(p.target == device != p.source for p in pieces))
        return self._inboxes[key]

    def _compute(self, row: _Row, kind: str, stage: int, m: int) -> bool:
        """Advance the clock over one compute action; False when what it needs on this device is not there."""
        needed: list[_Key]
        if kind == "W":
            needed = [(row.device, stage, m, "B")]
        else:
            way = "F" if kind == "F" else "B"
            neighbour = stage - 1 if kind == "F" else stage + 1
            pieces = incoming(self.routes, stage, m, way)
            needed = [(row.device, neighbour, m, way) for p in pieces if p.source == p.target == row.device]
            needed += [(row.device, stage, m, "F")] if way == "B" else []
        if not all(key in self._done for key in needed):
            return False
        self._done.add((row.device, stage, m, "B" if kind == "I" else kind))
        if self.costs:
            samples = self.routes.samples(stage, row.device, m)
            row.clock_s += self.costs.action_s(stage, row.device, kind, samples, m)
        return True

    def _send(self, row: _Row, stage: int, m: int, way: str) -> list[str]:
        forward = way == "F"
        pieces = self.routes.forward_pieces(stage, m) if forward else self.routes.backward_pieces(stage, m)
        target_stage = stage + 1 if forward else stage - 1
        woken = []
        for piece in pieces:
            if piece.source != row.device or piece.target == row.device:
                continue
            arrival = row.clock_s
            if self.costs:
                wire = self.costs.wire(row.device, piece.target)
                num_bytes = self.costs.output_bytes.get(min(stage, target_stage), 0.0) * piece.samples
                free = max(row.clock_s, self._wire_free.get((row.device, piece.target), 0.0))
                self._wire_free[row.device, piece.target] = free = free + wire.occupied_s(num_bytes)
                arrival = free + wire.latency_s
            inbox = self._inbox((piece.target, target_stage, m, way))
            inbox.missing -= 1
            inbox.last = max(inbox.last, (arrival, row.clock_s))
            if not inbox.missing and inbox.reader is not None:
                woken.append(inbox.reader)
        return woken

    def _issue(self, row: _Row, stage: int) -> None:
        """REDUCE_GRAD: now, or during the last backward of its stage where nothing came between."""
        last = self._last_backward.get((stage, row.device))
        if last is not None and last is self._last_compute.get(row.device):
            self._issued[stage, row.device] = (last.end_s, last.end_s - last.start_s)
        else:
            self._issued[stage, row.device] = (row.clock_s, 0.0)

    def _finish(self) -> Times:
        costs = self.costs or Costs(compute_s={})
        barrier = max((r.clock_s for r in self.rows.values()), default=0.0)
        free: dict[str, float] = {}
        for reduction in costs.reductions:
            for seconds, readies in reduction.pieces:
                start = max(free.get(device, 0.0) for device in reduction.devices)
                for holder, ready in zip(reduction.holders, readies, strict=True):
                    end, length = self._issued[holder]
                    start = max(start, end - (1 - ready) * length)
                free.update(dict.fromkeys(reduction.devices, start + seconds))
        barrier = max([barrier, *free.values()])
        for row in self.rows.values():
            if row.at < len(row.actions):
                row.moments.append(Moment(action=row.actions[row.at], start_s=row.clock_s, end_s=barrier))
        return Times(
            moments={d: r.moments for d, r in self.rows.items()}, leads=self.leads, barrier_s=barrier
        )


def _lead(costs: Costs | None, device: str) -> tuple[float, float]:
    optimizer_s, overhead_s = costs.lead_s(device) if costs else (0.0, 0.0)
    return optimizer_s, optimizer_s + overhead_s


def times(schedule: Schedule, routes: Routes, costs: Costs) -> Times:
    """When each action of `schedule` starts and ends. ScheduleError when it deadlocks."""
    return Pass(schedule, routes, costs).run()
