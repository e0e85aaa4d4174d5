"""The topological pass: when each action starts and ends, by going through the rows once.

A device's next action starts when the one before has ended and what it needs is there. With t the row's clock:

    F, B, I, W   t ← t + seconds
    SEND         the wire to the peer is taken from max(t, its last end); the message arrives a latency after that
    RECV         t ← max(t, arrival of the last piece)
    STEP         t ← max over all devices and reductions, then agreement, update and overhead

Pairs of devices do not share links here (the event simulator does that), so each message's time is known when
it is sent and one pass suffices.
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
    """All moments by device; `barrier_s` is when every gradient is summed and the step may be taken."""

    moments: dict[str, list[Moment]]
    barrier_s: float
    step_s: float


@dataclass(kw_only=True)
class _Inbox:
    missing: int
    arrival_s: float = 0.0
    sent_s: float = 0.0


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
        self.rows = {d: _Row(device=d, actions=row) for d, row in schedule.actions.items()}
        self._inboxes: dict[tuple[str, int, int, str], _Inbox] = {}
        self._done: set[tuple[str, int, int, str]] = set()
        self._wire_free: dict[tuple[str, str], float] = {}
        self._issued: dict[tuple[int, str], tuple[float, float]] = {}
        self._last_backward: dict[tuple[int, str], Moment] = {}
        self._last_compute: dict[str, Moment] = {}
        self._waiting: dict[tuple[str, int, int, str], str] = {}

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
            if action.type in ("F", "B", "I", "W"):
                if not self._compute(row, action):
                    break
            elif action.type.startswith("SEND"):
                woken += self._send(row, action)
            elif action.type.startswith("RECV"):
                inbox = self._inbox(row.device, action)
                if inbox.missing:
                    self._waiting[row.device, action.stage, action.micro_batch, action.type[-1]] = row.device  # type: ignore[index]
                    break
                row.clock_s, sent = max(row.clock_s, inbox.arrival_s), inbox.sent_s
            else:
                self._issue(row, action)
            moment = Moment(action=action, start_s=start, end_s=row.clock_s, sent_s=sent)
            row.moments.append(moment)
            if action.type in ("F", "B", "I", "W"):
                self._last_compute[row.device] = moment
                if action.type in ("B", "W"):
                    self._last_backward[action.stage, row.device] = moment  # type: ignore[index]
            row.at += 1
        return woken

    def _inbox(self, device: str, action: Action) -> _Inbox:
        stage, m, way = action.stage, action.micro_batch, action.type[-1]
        key = (device, stage, m, way)
        if key not in self._inboxes:
            pieces = incoming(self.routes, stage, m, way)  # type: ignore[arg-type]
            count = sum(p.target == device != p.source for p in pieces)
            self._inboxes[key] = _Inbox(missing=count)  # type: ignore[index]
        return self._inboxes[key]  # type: ignore[index]

    def _compute(self, row: _Row, action: Action) -> bool:
        """Advance the clock over one compute action; False when what it needs on this device is not there."""
        kind, stage, m = action.type, action.stage, action.micro_batch
        assert stage is not None and m is not None
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
            row.clock_s += self.costs.action_s(stage, row.device, kind, samples)
        return True

    def _send(self, row: _Row, action: Action) -> list[str]:
        stage, m, way = action.stage, action.micro_batch, action.type[-1]
        assert stage is not None and m is not None
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
            receive = Action(type=f"RECV_{way}", stage=target_stage, micro_batch=m)  # type: ignore[arg-type]
            inbox = self._inbox(piece.target, receive)
            inbox.missing -= 1
            if arrival >= inbox.arrival_s:
                inbox.arrival_s, inbox.sent_s = arrival, row.clock_s
            waiting = self._waiting.pop((piece.target, target_stage, m, way), None)
            if waiting is not None:
                woken.append(waiting)
        return woken

    def _issue(self, row: _Row, action: Action) -> None:
        """REDUCE_GRAD: now, or during the last backward of its stage where nothing came between."""
        assert action.stage is not None
        last = self._last_backward.get((action.stage, row.device))
        if last is not None and last is self._last_compute.get(row.device):
            self._issued[action.stage, row.device] = (last.end_s, last.end_s - last.start_s)
        else:
            self._issued[action.stage, row.device] = (row.clock_s, 0.0)

    def _finish(self) -> Times:
        costs = self.costs or Costs(compute_s={})
        barrier = max((r.clock_s for r in self.rows.values()), default=0.0)
        free: dict[str, float] = {}
        for reduction in costs.reductions:
            for ready, seconds in reduction.pieces:
                start = max(free.get(device, 0.0) for device in reduction.devices)
                for holder in reduction.holders:
                    end, length = self._issued[holder]
                    start = max(start, end - (1 - ready) * length)
                free.update(dict.fromkeys(reduction.devices, start + seconds))
        barrier = max([barrier, *free.values()])
        step_s = barrier
        for row in self.rows.values():
            if row.at < len(row.actions):
                end = barrier + costs.agree_s + costs.update_s.get(row.device, 0.0)
                row.moments.append(Moment(action=row.actions[row.at], start_s=row.clock_s, end_s=end))
                step_s = max(step_s, end + costs.overhead_s.get(row.device, 0.0))
        return Times(moments={d: r.moments for d, r in self.rows.items()}, barrier_s=barrier, step_s=step_s)


def times(schedule: Schedule, routes: Routes, costs: Costs) -> Times:
    """When each action of `schedule` starts and ends. ScheduleError when it deadlocks."""
    return Pass(schedule, routes, costs).run()
