"""Devices that run several stages: these share the device's time and memory, in the schedule's order.

card b   F0 F1 .  .  F0' B0' B0 F2 F1' B1' ...     stages 0 and 2 of a pipeline on b, a, b take turns
card a   .  F0 F1 ..         B0 ...
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from evener.core.plan import Pipeline, Plan, Share
from evener.core.routes import Routes, StageRoute
from evener.cost.actions import plan_costs
from evener.cost.memory import StageMemory, stage_memory
from evener.cost.model import CostModel
from evener.cost.resident_memory import resident_peak
from evener.errors import UsageError
from evener.schedules.make import make
from evener.schedules.timing import Moment, times

_COMPUTE = ("F", "B", "I", "W")


@dataclass(frozen=True, kw_only=True)
class Played:
    """A step by the plan's schedule: when (stage number, device) ends its last compute, and by device
    seconds and bytes.
    """

    ends_s: dict[tuple[int, str], float]
    compute_s: dict[str, float]
    start_s: dict[str, tuple[float, float]]
    memory_bytes: dict[str, float]

    def end_s(self, device: str) -> float:
        """When `device` has computed all of its stages."""
        return max((end for (_, name), end in self.ends_s.items() if name == device), default=0.0)


def run_several(pipelines: Sequence[Pipeline]) -> bool:
    """Whether some device has more than one stage in all of `pipelines`."""
    held = Counter(n for p in pipelines for s in p.stages for x in s.shares for n in x.devices)
    return any(count > 1 for count in held.values())


def play(model: CostModel, plan: Plan) -> Played:
    """`plan` action by action, each device one at a time; links of a device pair one message after another.

    The schedule is the plan's own; "unequal", which is found by a search, is priced as the 1F1B that it is
    never slower than. UsageError for a trainer whose transfers hold both their ends. Example: stages of
    1 + 2 s each on b, a, b with two micro-batches: b alone has 2 · 6 = 12 s to compute.
    """
    if model.trainer.blocking_sends:
        raise UsageError(
            "a device with several stages has no price where transfers hold both their ends",
            remedy="a plan with one stage on each device",
        )
    routes, costs = Routes(plan), plan_costs(model, plan)
    name = "1f1b" if plan.schedule == "unequal" else plan.schedule
    played = times(make(plan, name=name, costs=costs), routes, costs)
    rows = {d: [m for m in row if m.action.type in _COMPUTE] for d, row in played.moments.items()}
    return Played(
        ends_s={(m.action.stage or 0, d): m.end_s for d, row in rows.items() for m in row},
        compute_s={d: sum(m.end_s - m.start_s for m in row) for d, row in rows.items()},
        start_s={d: (update, end - update) for d, (update, end) in played.leads.items()},
        memory_bytes={d: play_bytes(model, routes, d, row) for d, row in rows.items()},
    )


def play_bytes(model: CostModel, routes: Routes, device: str, row: Sequence[Moment]) -> float:
    """The most that `device` holds while it goes through `row`, whose actions say what is in flight.

    Layers that several of its stages hold count once; of what comes and goes, that of the stage at work.
    """
    stages = {r.number: r for r in routes.stages if device in r.devices}
    held, most = 0.0, 0.0
    there = [r for r in stages.values() if r.stage.residence is None]
    for first, last, degree in _runs(model, there, device):
        data = model.bytes_at(degree)
        held += float(data.held(first, last))
        most += float(data.held(first, last) + data.update[last] - data.update[first])
    flying = Counter(dict.fromkeys(stages, 0))
    for moment in row:
        stage = moment.action.stage or 0
        flying[stage] += moment.action.type == "F"
        holding = {k: _memory(model, stages[k], device, n) for k, n in flying.items() if n}
        kept = sum(m.activations + m.boundary for m in holding.values())
        most = max(most, held + kept + holding[stage].transient + _resident(model, stages, device, flying))
        flying[stage] -= moment.action.type in ("B", "W")
    return most


def _resident(model: CostModel, stages: dict[int, StageRoute], device: str, flying: Counter[int]) -> float:
    """What stages with a residence hold beyond activations, each as if it were at work."""
    found = 0.0
    for number, route in stages.items():
        if route.stage.residence:
            n, samples = max(flying[number], 1), _share(route, device).samples
            whole = resident_peak(
                model.bytes,
                list(model.places),
                model.span(route.stage),
                samples,
                n,
                route.stage.residence,
                recompute=route.stage.recompute,
            )
            acts = _memory(model, route, device, n) if flying[number] else None
            found += max(whole - (acts.activations + acts.boundary if acts else 0.0), 0.0)
    return found


def _memory(model: CostModel, route: StageRoute, device: str, in_flight: int) -> StageMemory:
    share = _share(route, device)
    return stage_memory(
        model.bytes_at(len(share.devices)),
        *model.span(route.stage),
        samples=share.samples,
        in_flight=in_flight,
        recompute=route.stage.recompute,
    )


def _share(route: StageRoute, device: str) -> Share:
    return next(s for s in route.stage.shares if device in s.devices)


def _runs(model: CostModel, stages: Iterable[StageRoute], device: str) -> list[tuple[int, int, int]]:
    """(first, end, degree) of runs of layers that `device` holds in these stages, each layer once."""
    degrees = {i: len(_share(r, device).devices) for r in stages for i in range(*model.span(r.stage))}
    runs: list[tuple[int, int, int]] = []
    for i, degree in sorted(degrees.items()):
        if runs and runs[-1][1:] == (i, degree):
            runs[-1] = (runs[-1][0], i + 1, degree)
        else:
            runs.append((i, i + 1, degree))
    return runs
