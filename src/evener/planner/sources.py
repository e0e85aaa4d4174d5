"""What a plan's numbers rest on where nothing was measured: said in its reasons and its prediction."""

from msgspec.structs import replace

from evener.core.fleet import Fleet, Link
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.core.words import some
from evener.planner.result import PlanResult


def marked(fleet: Fleet, profile: Profile, result: PlanResult) -> PlanResult:
    """`result` with a sentence for every kind of device and link whose figures were not measured.

    A prediction that rests on seconds nobody measured is of source "assumed".
    """
    used = [fleet.device(name) for name in result.plan.devices]
    kinds = {d.kind for d in used}
    assumed = _kinds_assumed(profile) & kinds
    said = []
    if assumed:
        said.append(f"assumed: seconds on {some(sorted(assumed), 5)} ({profile.note or 'not measured'})")
    table = {d.kind for d in used if d.memory_bytes is not None and d.memory_bytes.source == "table"}
    if table:
        said.append(
            f"table: memory of {some(sorted(table), 5)} as published, what the framework holds is assumed"
        )
    links = {x.kind or f"{x.a} - {x.b}" for x in _links(fleet, result.plan) if x.curve.source == "table"}
    if links:
        said.append(f"table: {some(sorted(links), 5)} at the published rate, less an assumed part")
    plan = result.plan
    if assumed and plan.prediction is not None:
        plan = replace(plan, prediction=replace(plan.prediction, source="assumed"))
    return replace(result, plan=plan, reasons=(*result.reasons, *said))


def _kinds_assumed(profile: Profile) -> set[str]:
    steps = {s.kind for s in profile.steps if s.forward_s and s.forward_s.source in ("assumed", "table")}
    return steps | {
        t.kind for t in profile.timings if t.forward_s and t.forward_s.source in ("assumed", "table")
    }


def _links(fleet: Fleet, plan: Plan) -> list[Link]:
    """Links whose two ends the plan uses."""
    if len(plan.devices) < 2:
        return []
    ends = {*plan.devices, *(fleet.device(n).host for n in plan.devices)}
    return [x for x in fleet.links if x.a in ends and x.b in ends]
