"""From a plan and a schedule's name to the schedule."""

from collections.abc import Callable

from evener.core.actions import Schedule
from evener.core.plan import Plan
from evener.core.routes import Routes, StageRoute
from evener.errors import ScheduleError, UsageError
from evener.schedules import gpipe, interleaved, one_f_one_b, zero_bubble
from evener.schedules.costs import Costs, unit_costs
from evener.schedules.listing import ListScheduler, Rows, Step
from evener.schedules.lowering import lower
from evener.schedules.unequal import unequal

NAMES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "unequal")
_STAGE_ORDERS: dict[str, Callable[[int, int, int], list[tuple[str, int]]]] = {
    "gpipe": gpipe.order,
    "1f1b": one_f_one_b.order,
    "zero-bubble": zero_bubble.order,
}


def make(
    plan: Plan, *, name: str | None = None, costs: Costs | None = None, in_waves: bool = False
) -> Schedule:
    """The schedule called `name` (default: the plan's own) for `plan`.

    Pipelines of one stage run forward and backward micro-batch by micro-batch, but for GPipe `in_waves`
    beside pipelines of several stages: then all devices run all forwards first, in one order. "unequal" needs
    `costs`; the others depend on the plan alone. UsageError for an unknown name. Example: a plan of one
    stage on one device with two micro-batches is "0F0 0B0 0F1 0B1 0REDUCE_GRAD STEP".
    """
    name = name or plan.schedule
    routes = Routes(plan)
    if name == "unequal":
        if costs is None:
            raise UsageError("the unequal schedule needs costs", remedy="make(plan, name=..., costs=...)")
        others = [n for n in NAMES if n != "unequal" and (n != "zero-bubble" or costs.splits_backward)]
        return unequal(routes, costs, [fixed(routes, other) for other in others])
    if in_waves and name == "gpipe" and any(r.num_stages > 1 for r in routes.stages):
        return lower(gpipe.in_waves(routes), routes)
    return lower(fixed(routes, name), routes)


def fixed(routes: Routes, name: str) -> Rows:
    """Compute actions of the schedules that need no costs.

    Stages that meet on a device keep each its own order; they are merged by playing them in unit time
    (forward 1, backward 2), backwards before forwards.
    """
    if name not in NAMES or name == "unequal":
        raise UsageError(f"no schedule is called {name!r}", remedy=f"one of {', '.join(NAMES)}")
    if name != "interleaved":
        return _merge(routes, _stage_threads(routes, _STAGE_ORDERS[name]))
    for extra in range(sum(len(r.sizes) for r in routes.stages) + 1):
        try:
            return _merge(routes, _interleaved_threads(routes, extra))
        except ScheduleError:  # the map is not Megatron's: let more forwards run ahead
            continue
    raise AssertionError("all forwards before all backwards cannot wait for itself")


def _merge(routes: Routes, threads: dict[str, list[list[Step]]]) -> Rows:
    return ListScheduler(routes, unit_costs(routes), threads, _backward_first).run().rows


def _backward_first(device: str, step: Step) -> tuple[int, int, int]:
    kind, stage, m = step
    return ("BIFW".index(kind), m, stage if kind == "F" else -stage)


def _stage_threads(routes: Routes, order: Callable[[int, int, int], list[tuple[str, int]]]):
    threads: dict[str, list[list[Step]]] = {device: [] for device in routes.devices}
    for route in routes.stages:
        count = len(route.sizes)
        stage_order = order if route.num_stages > 1 else one_f_one_b.order
        steps = [
            Step(kind, route.number, m) for kind, m in stage_order(route.position, route.num_stages, count)
        ]
        _give(routes, threads, route, steps)
    return threads


def _give(routes: Routes, threads, route: StageRoute, steps: list[Step]) -> None:
    for device in route.devices:
        threads[device].append([s for s in steps if routes.samples(s.stage, device, s.micro_batch)])


def _interleaved_threads(routes: Routes, extra: int):
    threads: dict[str, list[list[Step]]] = {device: [] for device in routes.devices}
    for which, pipeline in enumerate(routes.plan.pipelines):
        stages = [r for r in routes.stages if r.pipeline == which]
        if len(stages) == 1:
            steps = [Step(k, stages[0].number, m) for k, m in one_f_one_b.order(0, 1, len(stages[0].sizes))]
            _give(routes, threads, stages[0], steps)
            continue
        for place, device in enumerate(pipeline.devices):
            held = {r.position: r.number for r in stages if device in r.devices}
            steps = [
                Step(kind, held[position], m)
                for kind, position, m in interleaved.order(
                    list(held), place, len(pipeline.devices), len(stages[0].sizes), extra
                )
            ]
            threads[device].append([s for s in steps if routes.samples(s.stage, device, s.micro_batch)])
    return threads
