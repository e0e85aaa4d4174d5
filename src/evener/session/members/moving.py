"""Looks, beside the steps, for a plan with other layers on the devices, and proposes it where it is repaid.

belief changed ─► planner over all shapes, in a thread of the leading device ─► gain · steps left ≥ 2 · move?
                                                                                └─► the next generation
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from evener import planner
from evener.core.fleet import Fleet
from evener.core.job import Job, Shapes
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.errors import EvenerError
from evener.planner.result import PlanResult
from evener.policy.adapt import Situation, believing, decide_layers, slowed_by
from evener.policy.shares import for_stealing
from evener.session.loop.adapting import situation_of
from evener.session.members.changes import Changes
from evener.session.members.member import Generation, Member
from evener.session.planning.decide import samples_to_train
from evener.session.planning.inexact import with_inexact

Propose = Callable[[Plan, str], None]


class Mover:
    """One search at a time; what is asked meanwhile is looked at when it has ended, the newest question only.

    `propose(plan, why)` is called from its thread, `tell(sentence)` too.
    """

    def __init__(
        self,
        situation: Situation,
        shapes: Shapes,
        finish: Callable[[Plan], Plan],
        propose: Propose,
        tell: Callable[[str], None],
    ) -> None:
        self._situation, self._shapes, self._finish = situation, shapes, finish
        self._propose, self._tell = propose, tell
        self._thread = ThreadPoolExecutor(1, "moving layers")
        self._asked: Future | None = None

    def look(self, plan: Plan, factors: dict[str, float], steps_left: int) -> None:
        """Search with what is believed now; returns at once."""
        if self._asked:
            self._asked.cancel()
        self._asked = self._thread.submit(self._search, plan, factors, steps_left)

    def close(self) -> None:
        """Search no more; what is under way ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _search(self, plan: Plan, factors: dict[str, float], steps_left: int) -> None:
        try:
            decision = decide_layers(plan, self._situation, factors, steps_left, self._make)
            if decision.move_s:
                self._tell(decision.why)
            if decision.do == "layers":
                self._propose(self._finish(decision.plan), decision.why)
        except EvenerError as e:
            self._tell(f"no other placement was found: {e.what}")
        except Exception as e:  # nobody asks for this thread's result, so it would be lost without a word
            self._tell(f"no other placement was found: {type(e).__name__}: {e}")

    def _make(self, fleet: Fleet, profile: Profile, job: Job) -> PlanResult:
        return planner.plan(fleet, profile, job, shapes=self._shapes)


def mover_of(member: Member, generation: Generation, changes: Changes | None) -> Mover | None:
    """The search of an elastic run on its leading device; None for a given plan, or without a profile."""
    request, recipe, steps = member.request, member.recipe, generation.steps
    if steps is None or steps.adapter is None or changes is None or request.plan is not None:
        return None
    profile, fleet = member.profile, generation.turn.fleet
    if profile is None:
        return None
    situation = situation_of(request, fleet, steps.plan, profile)
    stop = samples_to_train(request, len(recipe.dataset), recipe.global_batch)

    def finish(plan: Plan) -> Plan:
        if steps.plan.steal and plan.prediction:
            factors = plan.prediction.factors
            plan = believing(for_stealing(plan, *slowed_by(fleet, profile, factors), situation.job), factors)
        return with_inexact(plan, recipe, profile)

    mover = Mover(
        situation,
        "data-parallel" if steps.plan.steal else request.shapes,
        finish,
        changes.propose,
        lambda why: steps.decisions.append(f"after step {steps.number - 1}: {why}"),
    )
    steps.adapter.look_further = lambda plan, factors: mover.look(
        plan, factors, -(-(stop - steps.samples_seen) // plan.global_batch)
    )
    return mover
