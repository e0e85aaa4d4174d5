"""Keep, move micro-batches or move layers: a decision with its sums, from what is believed of the devices."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from msgspec.structs import replace

from evener.core.figures import Value
from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.planner.groups import ms
from evener.planner.result import PlanResult
from evener.planner.slowed import slowed
from evener.policy.move import move_seconds, same_holdings
from evener.policy.shares import reshared

LEAST_GAIN = 0.03
CALM_STEPS = 100
REPAY = 2.0
"""A move of layers must save this many times what it costs over the steps that remain."""

MakePlan = Callable[[Fleet, Profile, Job], PlanResult]


class Situation(Value, frozen=True, kw_only=True):
    """What decisions are made from: the fleet, the profile as measured, and what the user asked for."""

    fleet: Fleet
    profile: Profile
    job: Job

    def slowed(self, factors: Mapping[str, float]) -> "Situation":
        """The same with each device's seconds times its factor."""
        fleet, profile = slowed_by(self.fleet, self.profile, factors)
        return Situation(fleet=fleet, profile=profile, job=self.job)


def slowed_by(fleet: Fleet, profile: Profile, factors: Mapping[str, float]) -> tuple[Fleet, Profile]:
    """Fleet and profile in which each device of `factors` takes so many times its seconds."""
    for name, factor in factors.items():
        if factor != 1.0:
            fleet, profile = slowed(fleet, profile, name, factor)
    return fleet, profile


class Decision(Value, frozen=True, kw_only=True):
    """What to do before the next step, and the sentence why, with its sums.

    `plan` is the one to go on with, `gain_s` what each step saves, `move_s` what going there costs once.
    """

    do: Literal["keep", "micro-batches", "recompute", "layers"]
    plan: Plan
    why: str
    gain_s: float = 0.0
    move_s: float = 0.0


def least_gain(moves: Sequence[int], step: int) -> float:
    """The part of a step that a change must save: 3 %, twice as much for each change of the last 100 steps.

    So estimates that a change itself disturbs cannot send samples to and fro: the fifth change within 100
    steps would have to save 48 %. Example: changes in steps 10 and 40 make it 12 % at step 50, and 6 % at
    step 115.
    """
    return LEAST_GAIN * 2 ** sum(1 for at in moves if step - at < CALM_STEPS)


def decide_shares(plan: Plan, situation: Situation, factors: Mapping[str, float], least: float) -> Decision:
    """Whether other numbers of samples on the same holdings save at least the part `least` of a step.

    Example: devices of 4 and 12 ms a sample with 12 and 4 of 16 samples; the first is now 3 times slower. The
    step would go on at 144 ms; 8 and 8 take 96: a gain of 33 %, at once.
    """
    now = situation.slowed(factors)
    best, before_s = reshared(plan, now.fleet, now.profile, now.job)
    assert best.prediction is not None
    gain_s = before_s - best.prediction.step_s
    told = _told(factors)
    if not gain_s >= least * before_s or best.pipelines == plan.pipelines:
        why = (
            f"{told}: the plan stays, other shares would save {ms(max(gain_s, 0.0))} of {ms(before_s)} "
            f"a step, less than {least:.0%}"
        )
        return Decision(do="keep", plan=plan, why=why, gain_s=gain_s)
    why = (
        f"{told}: samples move, {_samples(plan)} become {_samples(best)}; a step takes "
        f"{ms(best.prediction.step_s)} instead of {ms(before_s)} ({gain_s / before_s:.0%} less), at once"
    )
    return Decision(do="micro-batches", plan=believing(best, factors), why=why, gain_s=gain_s)


def decide_layers(
    plan: Plan, situation: Situation, factors: Mapping[str, float], steps_left: int, make: MakePlan
) -> Decision:
    """Whether a new search (`make`) finds a plan whose gain over the remaining steps repays the move.

        steps_left · (step_s now - step_s then) ≥ 2 · move_s        and a gain of `LEAST_GAIN` of a step

    `plan` is compared with its best shares. Example: 300 steps that each save 20 ms repay a move of 2 s (6 ≥
    4), 150 do not.
    """
    now = situation.slowed(factors)
    best, _ = reshared(plan, now.fleet, now.profile, now.job)
    found = make(now.fleet, now.profile, now.job).plan
    assert best.prediction is not None and found.prediction is not None
    told, before_s, after_s = _told(factors), best.prediction.step_s, found.prediction.step_s
    gain_s = before_s - after_s
    if same_holdings(plan, found) or gain_s <= 0:
        why = f"{told}: no other placement is faster than {ms(before_s)} a step"
        return Decision(do="keep", plan=plan, why=why)
    move_s = move_seconds(plan, found, now.profile, now.fleet)
    saved_s = steps_left * gain_s
    sums = (
        f"{ms(after_s)} instead of {ms(before_s)} a step, {ms(saved_s)} over the {steps_left} steps left; "
        f"the move takes about {ms(move_s)}"
    )
    short = (
        f"which is not repaid {REPAY:g} times"
        if saved_s < REPAY * move_s
        else f"and less than {LEAST_GAIN:.0%} of a step is gained"
        if gain_s < LEAST_GAIN * before_s
        else ""
    )
    if short:
        why = f"{told}: layers stay, as {sums}, {short}"
        return Decision(do="keep", plan=plan, why=why, gain_s=gain_s, move_s=move_s)
    why = f"{told}: layers move, {sums}"
    return Decision(do="layers", plan=believing(found, factors), why=why, gain_s=gain_s, move_s=move_s)


def believing(plan: Plan, factors: Mapping[str, float]) -> Plan:
    """The plan with what its prediction was made from."""
    assert plan.prediction is not None
    return replace(plan, prediction=replace(plan.prediction, factors=dict(factors)))


def _told(factors: Mapping[str, float]) -> str:
    """Example: "seconds over the profile's: lab1/a 3.02"."""
    moved = [f"{name} {factor:.3g}" for name, factor in factors.items() if factor != 1.0]
    return f"seconds over the profile's: {', '.join(moved)}" if moved else "all devices keep to the profile"


def _samples(plan: Plan) -> str:
    return ":".join(str(n) for n in plan.samples_by_device().values())
