"""Between two steps: what was measured goes into the estimates, and the leading device decides for all.

every device   totals of the step ──► estimates (the same everywhere) ──► has a belief changed?
leading one                                                               └─► decides, hands the plan on
"""

from collections.abc import Callable

import torch

from evener.core.files import decode, encode
from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.core.seams import Wire
from evener.planner.links import UNLINKED
from evener.policy.adapt import Decision, Situation, decide_shares, least_gain
from evener.policy.estimate import Estimates, Pace, updated
from evener.runtime.executor import StepResult
from evener.session.request import Request

WARM_UP = 2
"""Steps not looked at after the start: kernels are chosen, memory is reserved, a rehearsal counts."""
AFTER_A_CHANGE = 1

Decide = Callable[[Plan, dict[str, float], float], Decision]


class Adapter:
    """Whether the plan changes before the next step; called by all devices of the plan after each one.

    `decide(plan, factors, least gain)` is asked on the leading device only, and only when a belief has
    changed; its answer travels over `wire`, so that all go on with one plan whatever their processors make of
    a rounding.
    """

    def __init__(self, wire: Wire, plan: Plan, decide: Decide | None) -> None:
        self._wire, self._decide = wire, decide
        believed = plan.prediction.factors if plan.prediction else {}
        self.estimates = Estimates(paces={d: Pace(factor=factor) for d, factor in believed.items()})
        self.look_further: Callable[[Plan, dict[str, float]], None] = lambda plan, factors: None
        self._moves: list[int] = []
        self._look_again = 0

    def after_step(self, plan: Plan, result: StepResult) -> Decision | None:
        """The decision after a step of `plan`, None where what is believed stays."""
        number = result.number
        if result.samples != plan.global_batch or result.verdict.do != "apply":
            return None
        self._look_again = self._look_again or number + WARM_UP
        if number < self._look_again:
            return None
        self.estimates, changed = updated(self.estimates, self._seen(plan, result))
        if not changed:
            return None
        factors = self.estimates.factors
        made = self._decide and self._decide(plan, factors, least_gain(self._moves, number))
        decision = handed_on(self._wire, made, f"decision after step {number}")
        if decision.do != "keep":
            self._moves.append(number)
            self._look_again = number + 1 + AFTER_A_CHANGE
        self.look_further(decision.plan, factors)
        return decision

    def _seen(self, plan: Plan, result: StepResult) -> dict[str, float]:
        """Seconds of each device over the profile's, for the samples that it really ran.

        Example: predicted 2 s of computing for 20 samples, believing in a factor of 1.5; 4 s for 10 samples
        are 6.
        """
        assert plan.prediction is not None
        planned, seen = plan.samples_by_device(), {}
        for device, took_s in result.totals.compute_s.items():
            expected_s = plan.prediction.seconds.get(device, {}).get("compute", 0.0)
            if plan.is_data_parallel and planned[device]:
                expected_s *= result.totals.samples[device] / planned[device]
            if expected_s > 0 and took_s > 0:
                seen[device] = took_s / expected_s * plan.prediction.factors.get(device, 1.0)
        return seen


def handed_on(wire: Wire, made: Decision | None, key: str) -> Decision:
    """The decision that one device made, on all of them: its length and then its bytes, summed with zeros."""
    data = encode(made) if made else b""
    size = torch.tensor([len(data)], dtype=torch.int64)
    wire.all_reduce(size, f"{key}, size").wait()
    told = torch.zeros(int(size), dtype=torch.uint8)
    if made:
        told.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    wire.all_reduce(told, key).wait()
    return decode(bytes(told.tolist()), Decision, "a decision")


def adapter_of(
    request: Request, fleet: Fleet, plan: Plan, wire: Wire, profile: Profile | None
) -> tuple[Adapter | None, str]:
    """The adapter of a run, or None and the sentence why its plan stays as it is.

    `profile` is what was measured, on the leading device alone.
    """
    if not request.adapt or len(plan.devices) < 2:
        return None, ""
    if request.batch_per_device is not None or request.even:
        return None, "the shares are the user's own: they stay, whatever the devices' speeds turn out to be"
    if plan.fewer is not None and plan.fewer.parts_hosts:
        return None, f"hosts take steps by themselves ({plan.fewer}): the shares stay as planned"
    if plan.owners:
        return None, "the shares stay as planned: what a device holds and takes was planned together"
    if plan.prediction is None or not plan.prediction.seconds:
        return None, "the plan predicts no seconds by device, so nothing is known to compare with: it stays"
    if request.plan is not None and request.profile is None:
        return None, "a plan without its profile (--profile) stays as it is: other shares cannot be priced"
    if profile is None:
        return Adapter(wire, plan, None), ""
    now = situation_of(request, fleet, plan, profile)
    return Adapter(wire, plan, lambda plan, factors, least: decide_shares(plan, now, factors, least)), ""


def situation_of(request: Request, fleet: Fleet, plan: Plan, profile: Profile) -> Situation:
    """What decisions of this run are made from."""
    job = Job(
        global_batch=plan.global_batch,
        micro_batch=request.micro_batch,
        keep_all=request.keep_all,
        allow=(UNLINKED,),
    )
    return Situation(fleet=fleet, profile=profile, job=job)
