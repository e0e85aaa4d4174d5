"""Every order of a tiny plan's compute actions: the oracle for schedules that search."""

import itertools
from collections.abc import Iterator

from evener.core.plan import Plan
from evener.core.routes import Routes
from evener.errors import ScheduleError
from evener.schedules.costs import Costs
from evener.schedules.listing import Step
from evener.schedules.lowering import lower
from evener.schedules.timing import times


def orders(stage: int, num_micro_batches: int, kinds: str) -> Iterator[list[Step]]:
    """All rows of one stage in which each kind runs in micro-batch order and F comes before B or I."""

    def grow(done: tuple[int, ...], row: list[Step]) -> Iterator[list[Step]]:
        if len(row) == num_micro_batches * len(kinds):
            yield row
        for k, kind in enumerate(kinds):
            limit = num_micro_batches if k == 0 else done[k - 1]
            if done[k] < limit:
                step = Step(kind, stage, done[k])
                yield from grow((*done[:k], done[k] + 1, *done[k + 1 :]), [*row, step])

    yield from grow((0,) * len(kinds), [])


def most_in_flight(row: list[Step]) -> int:
    flying = most = 0
    for step in row:
        flying += {"F": 1, "B": -1, "W": -1}.get(step.kind, 0)
        most = max(most, flying)
    return most


def shortest_s(plan: Plan, costs: Costs, kinds: str, in_flight: int) -> float:
    """The shortest step over all orders of a plan with one stage a device."""
    routes = Routes(plan)
    choices = [
        [r for r in orders(s.number, len(s.sizes), kinds) if most_in_flight(r) <= in_flight]
        for s in routes.stages
    ]
    best = float("inf")
    for rows in itertools.product(*choices):
        compute = {s.devices[0]: row for s, row in zip(routes.stages, rows, strict=True)}
        try:
            best = min(best, times(lower(compute, routes), routes, costs).barrier_s)
        except ScheduleError:  # orders that wait for one another
            continue
    return best
