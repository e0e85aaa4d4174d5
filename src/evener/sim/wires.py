"""Messages on their way: one after another per device pair, pairs on one bus sharing its rate.

A message has `occupied_s` of work. A bus with n messages under way does 1/n of each one's work per second; a
message behind a cut does none and takes no part of the rate.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from evener.schedules.costs import Wire
from evener.sim.windows import Windows


@dataclass(kw_only=True)
class Message:
    """Work left on the bus, and what to do with the arrival time when it is through."""

    source: str
    target: str
    left_s: float
    latency_s: float
    arrived: Callable[[float], None]


@dataclass(kw_only=True)
class _Bus:
    moving: list[Message] = field(default_factory=list)
    since_s: float = 0.0
    version: int = 0


class Wires:
    """All buses. `at(time, action)` is how the simulator is asked to call back later."""

    def __init__(self, windows: Windows, at: Callable[[float, Callable[[float], None]], None]) -> None:
        self._windows, self._at = windows, at
        self._queues: dict[tuple[str, str], deque[Message]] = {}
        self._buses: dict[object, _Bus] = {}
        self._bus_of: dict[tuple[str, str], object] = {}

    def send(self, now_s: float, wire: Wire, num_bytes: float, message: Message) -> None:
        """Put `message` on its pair's queue; it starts at once when the pair is idle."""
        pair = (message.source, message.target)
        message.left_s = wire.occupied_s(num_bytes)
        self._bus_of[pair] = wire.bus or pair
        queue = self._queues.setdefault(pair, deque())
        queue.append(message)
        if len(queue) == 1:
            self._enter(now_s, message)

    def _enter(self, now_s: float, message: Message) -> None:
        bus = self._buses.setdefault(self._bus_of[message.source, message.target], _Bus())
        self._progress(bus, now_s)
        bus.moving.append(message)
        self._look_ahead(bus, now_s)

    def _flowing(self, bus: _Bus, now_s: float) -> list[Message]:
        return [m for m in bus.moving if not self._windows.is_cut(m.source, m.target, now_s)]

    def _progress(self, bus: _Bus, now_s: float) -> None:
        """Account for the time since the last look; nothing began, ended or was cut in between."""
        flowing = self._flowing(bus, bus.since_s)
        for message in flowing:
            message.left_s -= (now_s - bus.since_s) / len(flowing)
        bus.since_s = now_s

    def _look_ahead(self, bus: _Bus, now_s: float) -> None:
        """Call back at the next end of a message or change of a cut."""
        bus.version += 1
        version = bus.version
        flowing = self._flowing(bus, now_s)
        least = min((m.left_s for m in flowing), default=inf)
        through = [m for m in flowing if m.left_s == least]
        end_s = now_s + max(least, 0.0) * len(flowing) if flowing else inf
        change_s = min(
            (self._windows.next_change_s(m.source, m.target, now_s) for m in bus.moving), default=inf
        )

        def look(then_s: float) -> None:
            if bus.version != version:
                return
            self._progress(bus, then_s)
            if end_s <= change_s:
                self._leave(bus, then_s, through)
            self._look_ahead(bus, then_s)

        if min(end_s, change_s) < inf:
            self._at(min(end_s, change_s), look)

    def _leave(self, bus: _Bus, now_s: float, through: list[Message]) -> None:
        for message in through:
            bus.moving.remove(message)
            queue = self._queues[message.source, message.target]
            queue.popleft()
            self._at(now_s + message.latency_s, message.arrived)
            if queue:
                bus.moving.append(queue[0])
