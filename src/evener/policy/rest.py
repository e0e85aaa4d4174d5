"""What is left to do of a step when a device was lost in it: the samples whose gradients nobody has.

a has 0..11, b has 12..20, c is lost      21..31 are divided among a and b by their shares under the new plan
"""

from collections.abc import Sequence

from evener.core.membership import Rest, Standing
from evener.core.plan import Plan
from evener.core.ranges import Ranges, count, cut, dealt, gaps, joined
from evener.core.split import apportion
from evener.core.words import counted

LOSS_EVERY_S = 3600.0
"""How often a job is taken to lose a device: what decides whether copies against that are worth it."""
UNNOTICED = 0.001
"""A part of a step that nobody would miss."""


def worth_copying(copy_s: float, step_s: float) -> tuple[bool, str]:
    """Whether a copy of `copy_s` seconds in each step saves more than it costs, and the sentence why (not).

        copy_s · LOSS_EVERY_S / step_s ≤ step_s     or     copy_s ≤ UNNOTICED · step_s

    Between two losses the copies take the left side, and a loss then costs about a step less. Example: steps
    of 10 s are worth copies of up to 28 ms, steps of 1 s such of up to 1 ms.
    """
    most_s = max(step_s / LOSS_EVERY_S, UNNOTICED) * step_s
    told = f"a copy of its gradients takes {1000 * copy_s:.3g} ms of a step of {step_s:.3g} s"
    limit = f"{1000 * most_s:.3g} ms would be worth it, at a loss an hour"
    return copy_s <= most_s, f"{told}; {'' if copy_s <= most_s else 'no more than '}{limit}"


def rest_of(
    standings: Sequence[Standing], step: int, samples: int, before: Plan, plan: Plan
) -> tuple[Rest | None, str]:
    """How `step` of `samples` samples, begun under the plan `before`, is finished under `plan`; and why so.

    None where it is taken whole, by `plan` as any other; the sentence is empty where nobody had begun it.
    Only standings at `step` count. Example: 21 of 32 samples kept by a and b, whose shares under `plan` are 4
    and 3: a takes 6 of the other 11 anew, b 5.
    """
    begun = [s for s in standings if s.step == step and (s.kept or s.kept_none)]
    if not begun:
        return None, ""
    kept = {s.device: s.kept for s in begun if s.kept and s.device in plan.devices}
    why_not = _why_not(begun, kept, samples, before, plan)
    if why_not:
        return None, f"step {step} is taken anew whole: {why_not}"
    missing = gaps((r for ranges in kept.values() for r in ranges), samples)
    takers = [p.devices[0] for p in plan.pipelines]
    parts = dealt(missing, apportion(count(missing), [p.samples for p in plan.pipelines]))
    anew = {
        device: cut(ranges, p.micro_batch)
        for device, ranges, p in zip(takers, parts, plan.pipelines, strict=True)
    }
    return Rest(kept=kept, anew=anew), _told(step, samples, kept, anew, begun)


def _why_not(
    begun: Sequence[Standing], kept: dict[str, Ranges], samples: int, before: Plan, plan: Plan
) -> str:
    if not kept:
        reasons = dict.fromkeys(s.kept_none for s in begun if s.kept_none)
        left_out = [s.device for s in begun if s.kept]
        if left_out:
            reasons[f"{', '.join(left_out)} has no part in the new plan"] = None
        return "; ".join(reasons)
    if not plan.is_data_parallel:
        return "the new plan cuts the model, and gradients that are there are of the whole"
    if plan.global_batch != before.global_batch:
        return f"the global batch was {counted(before.global_batch, 'sample')} and is {plan.global_batch}"
    try:
        all_ = joined(r for ranges in kept.values() for r in ranges)
    except ValueError as e:
        return f"sample {e}"
    if all_ and (all_[0][0] < 0 or all_[-1][1] > samples):
        return f"samples {all_[0][0]} to {all_[-1][1]} were kept of {samples}"
    return ""


def _told(
    step: int, samples: int, kept: dict[str, Ranges], anew: dict[str, Ranges], begun: Sequence[Standing]
) -> str:
    """Example: "21 of 32 samples of step 14 are kept (a 12, b 9), the other 11 taken anew (a 6, b 5)"."""
    sentence = f"{_sum(kept)} of {counted(samples, 'sample')} of step {step} are kept ({_by_device(kept)})"
    if _sum(anew):
        sentence += f", the other {_sum(anew)} taken anew ({_by_device(anew)})"
    for s in begun:
        if s.device not in kept:
            sentence += f"; {s.device} kept none: {s.kept_none or 'it has no part in the new plan'}"
    return sentence


def _sum(by_device: dict[str, Ranges]) -> int:
    return sum(map(count, by_device.values()))


def _by_device(ranges: dict[str, Ranges]) -> str:
    return ", ".join(f"{device} {count(r)}" for device, r in ranges.items() if count(r))
