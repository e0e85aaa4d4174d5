"""Which schedule a step goes by: made from the plan alone, or by the leading process from the profile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from evener import schedules
from evener.core.actions import Schedule, parse_schedule
from evener.core.figures import Value
from evener.core.fleet import Fleet
from evener.core.order import global_batch_at, resized
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.core.words import counted
from evener.cost.evaluate import CostModel
from evener.errors import ScheduleError, UsageError
from evener.schedules.waves import wave_deadlock
from evener.session.meeting import Meeting
from evener.sim import plan_costs


class Printed(Value, frozen=True, kw_only=True):
    """A schedule as it is read and written: one device a line."""

    schedule: str


@dataclass(frozen=True, kw_only=True)
class Timetable:
    """The schedule of every step of a run.

    `made` has, by samples of a step, the schedules that need seconds and were made before the run. `norms`
    has, by stage, the BatchNorm layers whose micro-batches of the same number meet.
    """

    made: Mapping[int, Schedule] = field(default_factory=dict)
    norms: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def schedule(self, plan: Plan) -> Schedule:
        """The schedule of `plan`; ScheduleError where devices would wait for each other in BatchNorm.

        A plan for the schedule "unequal" whose micro-batches have changed since goes on with 1F1B. Where
        BatchNorm meets, GPipe has all devices go through micro-batches and layers in one order.
        """
        if plan.global_batch in self.made:
            schedule = self.made[plan.global_batch]
        else:
            name = "1f1b" if plan.schedule == "unequal" else plan.schedule
            schedule = schedules.make(plan, name=name, in_waves=any(self.norms.values()))
        if any(self.norms.values()):
            stuck = wave_deadlock(schedule, plan, self.norms)
            if stuck:
                raise ScheduleError(
                    f"the schedule {plan.schedule} cannot pool BatchNorm over waves: {stuck}",
                    numbers=f"{counted(len(plan.pipelines), 'pipeline')} of "
                    f"{', '.join(str(len(p.stages)) for p in plan.pipelines)} stages",
                    remedy='the schedule "gpipe" in the plan, each device in one pipeline, or '
                    'batch_norm="local"',
                )
        return schedule

    def after_shrinking(self) -> "Timetable":
        """That of a plan with other micro-batches: what was made for the old ones no longer fits."""
        return Timetable(norms=self.norms)


def step_sizes(dataset_size: int, global_batch: int) -> tuple[int, ...]:
    """The samples that a step can have. Example: 10 samples in fours make steps of 4 and of 2."""
    last = dataset_size - dataset_size % global_batch
    sizes = (global_batch_at(seen, dataset_size, global_batch).samples for seen in (0, last % dataset_size))
    return tuple(dict.fromkeys(sizes))


def agreed_schedules(
    plan: Plan, sizes: Sequence[int], fleet: Fleet, profile: Profile | None, meeting: Meeting
) -> dict[int, Schedule]:
    """Schedules that need seconds, by samples of a step: the leading process makes them for all.

    Empty for a plan whose schedule follows from the plan alone. UsageError without a profile.
    """
    if plan.schedule != "unequal":
        return {}
    if meeting.rank == 0:
        if profile is None:
            raise UsageError(
                'the plan\'s schedule is "unequal", which is made from measured seconds',
                remedy="--profile with the file that the plan was made from, or another schedule in the plan",
            )
        model = CostModel(fleet=fleet, profile=profile)
        for samples in sizes:
            sized = resized(plan, samples)
            schedule = schedules.make(sized, costs=plan_costs(model, sized))
            meeting.put(f"schedule/{samples}", Printed(schedule=str(schedule)))
    return {n: parse_schedule(meeting.get(f"schedule/{n}", Printed).schedule) for n in sizes}
