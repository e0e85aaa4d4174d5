"""One step of a plan in time: by the topological pass, or by the event simulator.

A step lasts from one barrier (every gradient summed) to the next: the time that repeats.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from evener.core.actions import Schedule
from evener.core.plan import Plan
from evener.core.routes import Routes
from evener.core.trace import Trace
from evener.schedules.costs import Costs
from evener.schedules.timing import times
from evener.sim.causes import shape_idle_s, spans
from evener.sim.events import EventSimulator
from evener.sim.windows import Windows


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A step played: its trace, its seconds, and bytes in use over time by device (event simulator only)."""

    trace: Trace
    step_s: float
    memory: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> dict[str, float]:
        """The most bytes in use at once, by device."""
        return {device: max(held for _, held in line) for device, line in self.memory.items()}


def step_seconds(schedule: Schedule, plan: Plan, costs: Costs) -> float:
    """Seconds of one step by the topological pass, without a trace: what a search calls many times.

    ScheduleError when the schedule deadlocks, UnknownNameError when a cost is missing. Example: the
    picture of 1F1B (4 stages, 5 micro-batches, F = 1, B = 2) is 24 s.
    """
    return times(schedule, Routes(plan), costs).barrier_s


def evaluate(schedule: Schedule, plan: Plan, costs: Costs) -> Outcome:
    """One step by the topological pass, with its trace. Links are not shared between device pairs here."""
    routes = Routes(plan)
    played = times(schedule, routes, costs)
    shape = shape_idle_s(schedule, routes, costs)
    trace = Trace(source="predicted", spans=tuple(spans(played, routes, costs, shape)), steps=1)
    return Outcome(trace=trace, step_s=played.barrier_s)


def simulate(schedule: Schedule, plan: Plan, costs: Costs, *, windows: Windows | None = None) -> Outcome:
    """One step by the event simulator: buses share their rate, `windows` slow devices and cut links."""
    routes = Routes(plan)
    simulator = EventSimulator(schedule, routes, costs, windows=windows)
    played = simulator.run()
    shape = shape_idle_s(schedule, routes, costs)
    trace = Trace(source="predicted", spans=tuple(spans(played, routes, costs, shape)), steps=1)
    return Outcome(trace=trace, step_s=played.barrier_s, memory=simulator.memory)
