"""The plan of the next generation: the planner's, where the job was planned; else the smallest change."""

import dataclasses
from collections.abc import Sequence

import msgspec

from evener.core.fleet import Fleet
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.errors import EvenerError, NoPlanFitsError
from evener.policy.adapt import believing, slowed_by
from evener.policy.without import with_device, without
from evener.session.planning.decide import choose_plan
from evener.session.planning.inexact import with_inexact
from evener.session.planning.placing import beside_tables
from evener.session.recipe import Recipe
from evener.session.request import Request


def next_plan(
    request: Request,
    recipe: Recipe,
    profile: Profile | None,
    fleet: Fleet,
    before: Plan,
    gone: Sequence[str],
    joined: Sequence[str] = (),
) -> tuple[Plan, str]:
    """The plan for `fleet` after `before`, without `gone` and with `joined`, and the sentence why this one.

    A plan or a split that the user gave is changed as little as possible: others take over what the lost
    devices did, a new one takes an average share. Raises NoPlanFitsError when nothing works.
    """
    given = request.plan is not None or request.batch_per_device is not None
    if profile is not None and not given:
        try:
            return _anew(request, recipe, profile, fleet, before)
        except EvenerError as e:
            why = f"the planner found nothing ({e.what})"
    elif given:
        why = "the split was given, so it changes as little as possible"
    else:
        why = "nothing was measured, so the plan changes as little as possible"
    lost = [d for d in gone if d in before.devices]
    plan, told = without(before, lost) if lost else (before, "")
    for device in joined:
        plan, sentence = with_device(plan, device)
        told = "; ".join(filter(None, (told, sentence)))
    if plan is before:
        return before, why
    missing = [d for d in plan.devices if d not in {x.name for x in fleet.devices}]
    if missing:
        raise NoPlanFitsError(
            f"no plan without {', '.join(lost)}", numbers=f"{', '.join(missing)} are not here"
        )
    return with_inexact(msgspec.structs.replace(plan, prediction=None), recipe), f"{why}: {told}"


def _anew(request: Request, recipe: Recipe, profile: Profile, fleet: Fleet, before: Plan) -> tuple[Plan, str]:
    """The planner's plan, believing of each device what was believed before."""
    told = before.prediction.factors if before.prediction else {}
    factors = {d.name: told[d.name] for d in fleet.devices if d.name in told}
    slow_fleet, slow_profile = slowed_by(beside_tables(fleet, before.tables), profile, factors)
    # How often hosts exchange was decided when the run began, and so was the batch of a step.
    recipe = dataclasses.replace(recipe, fewer=(), global_batch=before.global_batch)
    plan = choose_plan(msgspec.structs.replace(request, fewer=()), slow_fleet, recipe, slow_profile)
    if before.fewer:
        plan = with_inexact(msgspec.structs.replace(plan, fewer=before.fewer), recipe)
    if not factors:
        return plan, "planned anew"
    believed = ", ".join(f"{name} {factor:.3g}" for name, factor in factors.items())
    return believing(plan, factors), f"planned anew, seconds over the profile's: {believed}"
