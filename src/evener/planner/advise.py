"""The changes that would help a job most, each planned and played: gain, the sum that shows why, assumptions.

now    120 ms = 80 compute + 40 reduce          the device that waits least, now and then
then    84 ms = 80 compute +  4 reduce          gain: 120 / 84 - 1 = 43 %
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evener import schedules
from evener.core.figures import Value
from evener.core.job import Job, Shapes
from evener.core.plan import Plan
from evener.core.trace import CAUSES
from evener.cost.evaluate import CostModel
from evener.errors import EvenerError, NoPlanFitsError
from evener.planner.groups import ms
from evener.planner.result import PlanResult
from evener.planner.tries import Try
from evener.planner.what_if import World
from evener.sim import World as Played
from evener.sim import plan_costs, play, shrink

HELPS = 0.01
_MOST_PLAYED = 24
_SLIGHT = 0.002
Solve = Callable[[World, Job, Shapes], PlanResult]
"""The best plan of a world for a job; NoPlanFitsError where there is none."""


class Sum(Value, frozen=True, kw_only=True):
    """What a step takes, and of what: seconds by cause on the device that waits least. They add up.

    `played` is false where the profile has no seconds by layer to play: then it is the planner's sum.
    """

    step_s: float
    samples: int
    device: str
    seconds: dict[str, float]
    played: bool

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.step_s

    def __str__(self) -> str:
        """Example: "120 ms = 80 ms compute + 40 ms reduce (lab1/gpu0)"."""
        shown = {c: s for c, s in self.seconds.items() if s >= _SLIGHT * self.step_s}
        rest = self.step_s - sum(shown.values())
        parts = [f"{ms(s)} {c}" for c, s in sorted(shown.items(), key=lambda x: -x[1])]
        if rest > 1e-9 * self.step_s:
            parts.append(f"{ms(rest)} rest")
        return f"{ms(self.step_s)} = {' + '.join(parts)} ({self.device})"


class Gain(Value, frozen=True, kw_only=True):
    """One change and what it gives: `gain` in samples per second (0.1 is a tenth more), the sum after it, and
    what it assumes beyond what the job as it stands does. `gain` is absent where the job has no plan as yet.
    """

    change: str
    sort: str
    gain: float | None
    after: Sum
    assumed: tuple[str, ...] = ()

    @property
    def helps(self) -> bool:
        """Whether it gives a hundredth more samples a second, or a plan where there was none."""
        return self.gain is None or self.gain >= HELPS


class Counsel(Value, frozen=True, kw_only=True):
    """What would help, the best first, and all else that was tried: what helps less, and what cannot be.

    `now` is absent where the job has no plan as it stands; `why_not` says why then. `assumed` is what every
    sum here takes for granted.
    """

    now: Sum | None
    why_not: str = ""
    helps: tuple[Gain, ...] = ()
    others: tuple[Gain, ...] = ()
    failed: dict[str, str] = {}
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Planned:
    one: Try
    world: World
    result: PlanResult

    @property
    def samples_per_s(self) -> float:
        plan = self.result.plan
        assert plan.prediction is not None
        return plan.global_batch / plan.prediction.step_s


def counsel(
    world: World, job: Job, shapes: Shapes, tries: Sequence[Try], solve: Solve, *, most: int = 3
) -> Counsel:
    """The `most` changes among `tries` that help most, each with its gain, and what became of the others.

    Every try is planned; the best are played in the simulator, and ordered by that, so that those told and
    those behind them are compared by one measure. Of tries about one thing the best is told. A change helps
    that gives a hundredth more samples a second, or makes a job fit that has no plan. Schedules other than
    the plan's are played too. Raises NoPlanFitsError where the job has no plan and no change gives it one.
    """
    try:
        now: PlanResult | None = solve(world, job, shapes)
    except NoPlanFitsError as e:
        now, why = None, e
    base = None if now is None else sum_of(world, now.plan, job)
    planned, failed = _planned(tries, solve)
    planned.sort(key=lambda p: -p.samples_per_s)
    best, rest = planned[:_MOST_PLAYED], planned[_MOST_PLAYED:]
    known = frozenset() if now is None else _kinds(world, now.plan)
    gains = [_gain(p, sum_of(p.world, p.result.plan, p.one.job), base, known) for p in best]
    about = {id(g): p.one.about for g, p in zip(gains, best, strict=True)}
    if now is not None and base is not None:
        played, misfits = _schedules(world, now, job, base)
        gains += played
        failed |= misfits
    if now is None and not gains:
        raise why
    gains.sort(key=_by_gain)
    first = {about.get(id(g), g.change): g for g in reversed(gains) if g.helps}  # the best about each thing
    helps = sorted(first.values(), key=_by_gain)[:most]
    planner_base = None if now is None else _planned_sum(now.plan)
    gains += [_gain(p, _planned_sum(p.result.plan), planner_base, known) for p in rest]
    return Counsel(
        now=base,
        why_not="" if now is not None else f"{why.what} ({why.numbers})",
        helps=tuple(helps),
        others=tuple(sorted((g for g in gains if g not in helps), key=_by_gain)),
        failed=failed,
        assumed=() if now is None else _taken_for_granted(now),
    )


def _by_gain(gain: Gain) -> float:
    return -(gain.after.samples_per_s if gain.gain is None else gain.gain)


def _planned(tries: Sequence[Try], solve: Solve) -> tuple[list[_Planned], dict[str, str]]:
    found, failed = [], {}
    for one in tries:
        try:
            world = one.make()
            found.append(_Planned(one=one, world=world, result=solve(world, one.job, one.shapes)))
        except EvenerError as e:  # a kind without figures, slices without a link, no plan: each is told
            failed[one.change] = e.what
    return found, failed


def _kinds(world: World, plan: Plan) -> frozenset[str]:
    return frozenset(world.fleet.device(n).kind for n in plan.devices)


def _taken_for_granted(result: PlanResult) -> tuple[str, ...]:
    return tuple(r for r in result.reasons if r.startswith(("assumed", "table")))


def _gain(planned: _Planned, after: Sum, before: Sum | None, known: frozenset[str]) -> Gain:
    new = _kinds(planned.world, planned.result.plan) - known
    reasons = [r for r in _taken_for_granted(planned.result) if any(kind in r for kind in new)]
    assumed = (*planned.one.assumed, *planned.world.assumed, *reasons)
    return Gain(
        change=planned.one.change,
        sort=planned.one.sort,
        gain=None if before is None else after.samples_per_s / before.samples_per_s - 1,
        after=after,
        assumed=tuple(dict.fromkeys(assumed)),
    )


def sum_of(world: World, plan: Plan, job: Job, schedule: str | None = None) -> Sum:
    """A step of `plan` played in the simulator; the planner's own sum where no layers were timed.

    NoPlanFitsError where it holds more than a device's memory, which another schedule than the plan's may.
    """
    if not world.profile.timings:
        return _planned_sum(plan)
    model = CostModel(fleet=world.fleet, profile=world.profile)
    played = play(
        plan,
        Played(
            costs_of=lambda p: plan_costs(model, p, memory_margin=job.memory_margin),
            schedule_of=lambda p, costs: schedules.make(p, name=schedule, costs=costs),
            replan=shrink,
        ),
    )
    if schedule is not None:
        memory = plan_costs(model, plan, memory_margin=job.memory_margin).memory
        for name, peak in played.peak_bytes.items():
            limit = memory[name].limit_bytes
            if limit is not None and peak > limit:
                raise NoPlanFitsError(f"{schedule} holds more than fits on {name}")
    by_device = {name: played.trace.seconds_by_cause(name) for name in plan.devices}
    return _least_idle(played.step_s[0], plan.global_batch, by_device, played=True)


def _planned_sum(plan: Plan) -> Sum:
    told = plan.prediction
    assert told is not None
    return _least_idle(told.step_s, plan.global_batch, told.seconds, played=False)


def _least_idle(step_s: float, samples: int, by_device: dict[str, dict[str, float]], *, played: bool) -> Sum:
    idle = {n: c.get("wait", 0.0) + c.get("bubble", 0.0) for n, c in by_device.items()}
    name = min(idle, key=lambda n: idle[n])
    seconds: dict[str, float] = {c: s for c in CAUSES if (s := by_device[name].get(c, 0.0))}
    return Sum(step_s=step_s, samples=samples, device=name, seconds=seconds, played=played)


def _schedules(world: World, now: PlanResult, job: Job, base: Sum) -> tuple[list[Gain], dict[str, str]]:
    """The plan under each other schedule, where it has a pipeline of several stages; why some do not fit."""
    plan = now.plan
    if not base.played or not any(len(p.stages) > 1 for p in plan.pipelines):
        return [], {}
    found, misfits = [], {}
    for name in schedules.NAMES:
        if name == plan.schedule:
            continue
        change = f'"schedule": "{name}" in the plan'
        try:
            after = sum_of(world, plan, job, name)
        except NoPlanFitsError as e:
            misfits[change] = e.what
            continue
        split = "a backward splits into two equal parts" if name in ("zero-bubble", "unequal") else ""
        found.append(
            Gain(
                change=change,
                sort="schedule",
                gain=after.samples_per_s / base.samples_per_s - 1,
                after=after,
                assumed=(split,) if split else (),
            )
        )
    return found, misfits
