"""A device ran out of memory: how all redo the step. The leading one, which has the profile, decides."""

from collections.abc import Callable

from evener.core.fleet import Fleet
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.core.seams import Wire
from evener.cost.evaluate import CostModel
from evener.policy.adapt import Decision
from evener.policy.relief import relieve
from evener.session.loop.adapting import handed_on

Relieve = Callable[[Plan, tuple[str, ...], int], Decision]
"""(plan, devices that ran out, step) → the decision, the same on all devices, which ask together."""


def unpriced(plan: Plan, short: tuple[str, ...], number: int) -> Decision:
    """The decision without prices, which every device comes to by itself."""
    return relieve(plan, short)


def priced(wire: Wire, fleet: Fleet, profile: Profile | None, *, leads: bool) -> Relieve:
    """The decision by what each way costs, made on the leading device alone and handed on over `wire`."""

    def ask(plan: Plan, short: tuple[str, ...], number: int) -> Decision:
        made = None
        if leads:
            made = relieve(plan, short, CostModel(fleet=fleet, profile=profile) if profile else None)
        return handed_on(wire, made, f"relief after step {number}")

    return ask
