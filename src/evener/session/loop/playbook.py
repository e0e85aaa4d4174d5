"""What one device does in a step of a given size: its row of actions, and the samples it reads for it."""

from collections.abc import Callable, Sequence
from functools import lru_cache

from evener import schedules
from evener.core.actions import Action, Schedule
from evener.core.order import GlobalBatch, positions, resized
from evener.core.plan import Plan
from evener.core.routes import Routes


class Playbook:
    """The plan as device `here` plays it; steps of another size keep the plan's proportions.

    `schedule_of(plan)` gives the schedule of the plan in each size.
    """

    def __init__(
        self, plan: Plan, here: str, schedule_of: Callable[[Plan], Schedule] = schedules.make
    ) -> None:
        self.plan, self.here, self._schedule_of = plan, here, schedule_of
        self._page = lru_cache(maxsize=8)(self._make)
        self.forwards = lru_cache(maxsize=2)(self._make_forwards)

    def row(self, samples: int) -> tuple[Action, ...]:
        """This device's actions in a step of `samples` samples."""
        return self._page(samples)[1]

    def _make_forwards(self, samples: int) -> tuple[Routes, tuple[Action, ...]]:
        """Who takes what of `samples` held-out samples, and this device's actions, all forwards first."""
        plan = resized(self.plan, samples)
        return Routes(plan), schedules.make(plan, name="gpipe").actions[self.here]

    def held_out_reads(self, samples: int) -> list[tuple[int, int]]:
        """(stage, micro-batch) of every forward of `forwards` for which this device reads samples."""
        routes, row = self.forwards(samples)
        return [
            (a.stage, a.micro_batch)
            for a in row
            if a.type == "F" and a.stage is not None and a.micro_batch is not None
            if routes.stages[a.stage].is_first or routes.stages[a.stage].is_last
            if routes.samples(a.stage, self.here, a.micro_batch)
        ]

    def routes(self, samples: int) -> Routes:
        """Who takes what of a step of `samples` samples."""
        return self._page(samples)[0]

    def reads(self, batch: GlobalBatch) -> Sequence[tuple[int, int]]:
        """Ranges of the global batch that this device reads, in the order of its forwards."""
        return self._page(batch.samples)[2]

    def _make(self, samples: int) -> tuple[Routes, tuple[Action, ...], list[tuple[int, int]]]:
        plan = resized(self.plan, samples)
        routes = Routes(plan)
        row = self._schedule_of(plan).actions[self.here]
        reads = []
        for action in row:
            if action.type == "F" and action.stage is not None and action.micro_batch is not None:
                route = routes.stages[action.stage]
                if route.is_first or route.is_last:
                    reads.append(positions(routes, action.stage, self.here, action.micro_batch))
        return routes, row, reads
