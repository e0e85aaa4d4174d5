"""A schedule made for unequal stage times: list scheduling over the plan's costs, and a search over its
urgencies.

Every device takes the ready action with the least urgency number

    u(kind, stage, m) = m · period + offset(kind, stage)

where the period is the seconds that the busiest device needs for one micro-batch. Offsets come from a few
rules (backward first, along the critical path, forward first), then change at random while that shortens it;
the best schedule that needs no costs is a candidate too, so the result is never slower than one of them
that fits the memory. Deterministic: the random numbers have a fixed seed and the search a fixed number of
tries.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from evener.core.actions import Schedule
from evener.core.routes import Routes
from evener.errors import ScheduleError
from evener.schedules.costs import Costs
from evener.schedules.listing import Limits, ListScheduler, Rows, Step
from evener.schedules.lowering import lower
from evener.schedules.timing import times

WORK = 60_000
"""Compute actions played in one search: about a second. A larger plan gets fewer tries, at least 16."""

Offsets = dict[tuple[str, int], float]


def unequal(
    routes: Routes, costs: Costs, fixed: Sequence[Rows], *, work: int = WORK, seed: int = 0
) -> Schedule:
    """The fastest schedule found for `routes` at `costs`; `fixed` are compute rows to be at least as fast as.

    Memory: what is in flight stays below each device's limit less its fixed bytes; for a device without a
    limit, at most as many micro-batches per stage as its pipeline has stages. ScheduleError when not even one
    micro-batch fits.
    """
    limits = _limits(routes, costs)
    rows: Rows = {}
    for devices in _components(routes):
        rows |= _Search(routes, costs, devices, limits, work, seed).best()
    candidates = [rows, *(r for r in fixed if _fits(r, routes, limits))]
    schedules = [lower(r, routes) for r in candidates]
    return min(schedules, key=lambda s: times(s, routes, costs).barrier_s)


def _limits(routes: Routes, costs: Costs) -> Limits:
    room: dict[str, float] = {}
    saved: dict[tuple[str, int], float] = {}
    whole: dict[str, float] = {}
    bounded = set()
    for device in routes.devices:
        memory = costs.memory.get(device)
        if memory is None or memory.limit_bytes is None:
            continue
        bounded.add(device)
        room[device] = memory.limit_bytes - memory.fixed_bytes
        saved |= {(device, stage): b for stage, b in memory.saved_bytes.items()}
        whole[device] = least = max(
            sum(
                saved.get((device, r.number), 0.0) * routes.samples(r.number, device, 0)
                for r in routes.stages
                if r.pipeline == which and device in r.devices
            )
            for which in range(len(routes.plan.pipelines))
        )
        if least > room[device]:
            raise ScheduleError(
                f"not one micro-batch fits {device}",
                numbers=f"needs {least:.0f} bytes, {room[device]:.0f} are free",
                remedy="a smaller micro-batch, fewer layers on this device, or recompute",
            )
    in_flight = {r.number: r.num_stages for r in routes.stages if not set(r.devices) <= bounded}
    return Limits(in_flight=in_flight, room=room, saved_bytes=saved, whole_bytes=whole)


def _fits(rows: Rows, routes: Routes, limits: Limits) -> bool:
    """Whether the rows stay within `limits`; what is in flight depends on each row's order alone."""
    for device, row in rows.items():
        used, flying = 0.0, dict.fromkeys(range(len(routes.stages)), 0)
        for kind, stage, m in row:
            sign = 1 if kind == "F" else -1 if kind in "BW" else 0
            flying[stage] += sign
            used += sign * limits.saved_bytes.get((device, stage), 0.0) * routes.samples(stage, device, m)
            if flying[stage] > limits.in_flight.get(stage, flying[stage]):
                return False
            if used > limits.room.get(device, used) * (1 + 1e-12):
                return False
    return True


def _components(routes: Routes) -> list[list[str]]:
    """Devices that some pipeline joins; pipelines on other devices are scheduled on their own."""
    groups: list[set[str]] = []
    for pipeline in routes.plan.pipelines:
        joined = set(pipeline.devices)
        apart = [g for g in groups if not g & joined]
        groups = [*apart, joined.union(*(g for g in groups if g & joined))]
    return [[d for d in routes.devices if d in g] for g in groups]


@dataclass(kw_only=True)
class _Try:
    """One point of the search: offsets by (kind, stage) and micro-batches in flight by stage."""

    offsets: Offsets
    in_flight: dict[int, int] = field(default_factory=dict)


class _Search:
    """Finds rows for `devices`, which share no pipeline with others."""

    def __init__(
        self, routes: Routes, costs: Costs, devices: list[str], limits: Limits, work: int, seed: int
    ) -> None:
        self.routes, self.costs, self.devices, self.limits = routes, costs, devices, limits
        self.stages = [r for r in routes.stages if set(r.devices) & set(devices)]
        self.random = random.Random(seed)
        kinds = ("F", "I", "W") if costs.splits_backward else ("F", "B")
        self.splits = {r.number: kinds if r.num_stages > 1 else ("F", "B") for r in self.stages}
        self.threads = {device: list(self._threads(device)) for device in devices}
        self.period_s = max(self._per_micro_batch(device) for device in devices)
        actions = sum(len(t) for threads in self.threads.values() for t in threads)
        self.tries = max(16, min(600, work // max(actions, 1)))

    def best(self) -> Rows:
        single = len(self.devices) == 1 and len(self.stages) == 1
        starts = self._starts()[:1] if single else self._starts()
        scored = sorted(((self._play(t), i, t) for i, t in enumerate(starts)), key=lambda x: (x[0][0], x[1]))
        (best_s, rows), _, current = scored[0]
        for _ in range(0 if single else self.tries):
            near = self._near(current)
            makespan_s, found = self._play(near)
            if makespan_s <= best_s:
                best_s, rows, current = makespan_s, found, near
        return rows

    def _threads(self, device: str):
        for route in self.stages:
            if device in route.devices:
                held = [m for m in range(len(route.sizes)) if self.routes.samples(route.number, device, m)]
                for kind in self.splits[route.number]:
                    yield [Step(kind, route.number, m) for m in held]

    def _seconds(self, stage: int, kind: str) -> float:
        """The slowest share's seconds for a whole micro-batch."""
        route = self.routes.stages[stage]
        held = [(d, self.routes.samples(stage, d, 0)) for d in route.devices]
        return max(self.costs.action_s(stage, d, kind, n) for d, n in held if n)

    def _per_micro_batch(self, device: str) -> float:
        mine = [r.number for r in self.stages if device in r.devices]
        return sum(self._seconds(stage, kind) for stage in mine for kind in self.splits[stage])

    def _starts(self) -> list[_Try]:
        early = self._earliest()
        far = 1e6 * self.period_s
        back = {k: s - (far if k[0] in "BI" else -far if k[0] == "W" else 0) for k, s in early.items()}
        front = {k: s - (far if k[0] == "F" else -far if k[0] == "W" else 0) for k, s in early.items()}
        lazy = {k: s + (far if k[0] == "W" else 0) for k, s in early.items()}
        ahead = {r.number: r.num_stages - r.position for r in self.stages}
        return [
            _Try(offsets=offsets, in_flight=in_flight)
            for offsets in (back, lazy, early, front)
            for in_flight in ({}, ahead)
        ]

    def _earliest(self) -> Offsets:
        """When the first micro-batch could do each action if nothing else ran."""
        offsets: Offsets = {}
        for last in (r for r in self.stages if r.is_last):
            chain = sorted((r for r in self.stages if r.pipeline == last.pipeline), key=lambda r: r.position)
            now = 0.0
            for route in chain:
                offsets["F", route.number] = now
                now += self._seconds(route.number, "F")
            for route in reversed(chain):
                for kind in self.splits[route.number][1:]:
                    offsets[kind, route.number] = now
                    now += self._seconds(route.number, kind) if kind != "W" else 0.0
        return offsets

    def _near(self, current: _Try) -> _Try:
        offsets, in_flight = dict(current.offsets), dict(current.in_flight)
        for key in self.random.sample(sorted(offsets), k=self.random.randint(1, min(3, len(offsets)))):
            scale = self.random.choice((0.2, 1.0, 4.0)) * self.period_s
            offsets[key] = min(max(offsets[key], -8 * scale), 8 * scale) + self.random.gauss(0, scale)
        if self.random.random() < 0.4:
            route = self.random.choice(self.stages)
            in_flight[route.number] = self.random.randint(1, min(len(route.sizes), 2 * route.num_stages))
        return _Try(offsets=offsets, in_flight=in_flight)

    def _play(self, which: _Try) -> tuple[float, Rows]:
        period_s, offsets = self.period_s, which.offsets

        def urgency(device: str, step: Step) -> tuple[float, ...]:
            return (step.micro_batch * period_s + offsets[step.kind, step.stage],)

        most: Mapping[int, int] = {
            r.number: min(
                which.in_flight.get(r.number, len(r.sizes)), self.limits.in_flight.get(r.number, len(r.sizes))
            )
            for r in self.stages
        }
        limits = replace(self.limits, in_flight=most)
        played = ListScheduler(self.routes, self.costs, self.threads, urgency, limits).run()
        return played.makespan_s, played.rows
