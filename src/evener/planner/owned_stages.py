"""State in unequal parts where pipelines cut the model: shapes first, then parts by what memory is left.

shapes    searched as ever, as if each device kept 1/2, 1/3, 1/4 of the state of its layers
parts     of each set of layers with the same holders, the tightest first:

          stage 0   a ██ parameters, activations │ 2/3 of the state │        parts 2:1 of layers 0 to 5
                    c ██████ parameters, activations │ 1/3 │
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec.structs import replace

from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.core.ownership import WORDS, holders_of, shares_of_state
from evener.core.plan import Held, Ownership, Plan, Prediction
from evener.core.profile import Profile
from evener.cost.evaluate import PlanCost, bounds_of, evaluate
from evener.cost.memory import bytes_by_layer, usable_bytes
from evener.cost.model import CostModel
from evener.cost.owned_stages import StagedOwners
from evener.errors import NoPlanFitsError
from evener.planner.aim import aim_of
from evener.planner.parts import filled, simple
from evener.planner.result import PlanResult
from evener.planner.whole import limiter_of, plan_whole

WHOLE = 1000
"""Parts are searched in thousandths."""
_SPREADS = (2, 3, 4)  # holders over which a search takes the state of a layer to be spread


def plan_stages(fleet: Fleet, profile: Profile, job: Job, levels: Sequence[Held]) -> PlanResult | None:
    """The best plan that cuts the model and keeps state in parts; None where none fits.

    At the first of `levels` that fits: gradients in parts only send more. Errors of the tables (far outside,
    not measured) pass through.
    """
    if not _has_room(fleet, profile, job):
        return None
    model, aim = CostModel(fleet=fleet, profile=profile), aim_of(fleet, job)
    best: tuple[float, PlanResult] | None = None
    for held in levels:
        for found in _shapes(fleet, profile, job, held):
            result = _in_parts(model, job, found, held)
            if result is None or result.plan.prediction is None:
                continue
            step_s = result.plan.prediction.step_s
            value = aim.value(step_s, result.plan.devices)
            if step_s <= (job.max_step_s or math.inf) and (best is None or value < best[0]):
                best = value, result
        if best:
            break
    return best[1] if best else None


def _has_room(fleet: Fleet, profile: Profile, job: Job) -> bool:
    """Whether all devices together can keep the model once: without that no cut is worth a search."""
    model = CostModel(fleet=fleet, profile=profile)
    parameters = sum(layer.param_bytes for layer in profile.layers)
    least = parameters + model.bytes.gradients[-1] + model.bytes.optimizer[-1]
    return least <= sum(usable_bytes(d, job.memory_margin) for d in fleet.devices)


def _shapes(fleet: Fleet, profile: Profile, job: Job, held: Held) -> Iterator[PlanResult]:
    """The best shapes with less state on each device, each plan once."""
    seen: set[Plan] = set()
    for spread in _SPREADS:
        if len(fleet.devices) < 2 * spread:
            return
        gradients = profile.gradient_bytes or int(bytes_by_layer(profile.layers).sum())
        lighter = replace(
            profile,
            state_bytes=profile.state_bytes // spread,
            update_bytes=profile.update_bytes and profile.update_bytes // spread,
            gradient_bytes=max(gradients // (spread if held == "gradients" else 1), 1),
        )
        try:
            found = plan_whole(fleet, lighter, replace(job, state="replicated"), None)
        except NoPlanFitsError:
            continue
        shape = replace(found.plan, prediction=None, why="", left_out=(), reductions=())
        stages = [stage for _, _, stage in shape.numbered_stages()]
        runs = not any(s.residence or any(len(x.devices) > 1 for x in s.shares) for s in stages)
        if runs and not shape.is_data_parallel and shape not in seen:
            seen.add(shape)
            yield found


def _in_parts(model: CostModel, job: Job, found: PlanResult, held: Held) -> PlanResult | None:
    """The shape of `found` with parts that fit; None where there are none."""
    shape = replace(found.plan, reductions=(), prediction=None, schedule=_schedule(found.plan, held))
    usable = {d: usable_bytes(model.fleet.device(d), job.memory_margin) for d in shape.devices}
    owners = parts_by_memory(model, shape, held, usable)
    if not owners or (held == "gradients" and _has_several(shape)):
        return None
    plan = replace(shape, owners=owners)
    cost = evaluate(model, plan)
    if any(b > usable[d] for d, b in cost.memory_bytes.items()):
        return None
    before = found.plan.prediction
    assert before is not None, "a search prices what it finds"
    limits = limiter_of(cost, owned=True)
    why = f"{_sentence(plan, held)}; {limits}"
    gap = 1 - (1 - found.gap) * before.step_s / cost.step_s
    return replace(
        found,
        plan=replace(plan, prediction=_prediction(model, plan, cost, before), why=why),
        limiter=limits,
        reasons=(_sentence(plan, held), *found.reasons),
        gap=min(max(gap, 0.0), 1.0),
        status="within",
    )


def parts_by_memory(
    model: CostModel, plan: Plan, held: Held, usable: dict[str, float]
) -> tuple[Ownership, ...]:
    """Owners of all layers that several devices hold, within `usable` bytes; none where they do not fit.

    Equal parts where memory allows them, which is what links do fastest. Example: 300 bytes of state on two
    devices with 200 and 120 bytes left: 180 and 120, parts 3:2.
    """
    data, held_on = model.bytes, holders_of(plan)
    state = np.diff(data.optimizer) + (np.diff(data.gradients) if held == "gradients" else 0.0)
    with_first = {i for first, places in data.tied.items() for i in places if i != first}
    sets: dict[frozenset[str], list[int]] = {}
    for i, layer in enumerate(model.profile.layers):
        holders = frozenset(held_on[layer.name])
        if len(holders) > 1 and layer.param_bytes and i not in with_first:
            sets.setdefault(holders, []).append(i)
    left = {d: min(usable[d] - b, 1e18) for d, b in evaluate(model, plan).memory_bytes.items()}
    for holders, layers in sets.items():
        for d in holders:
            left[d] += float(state[layers].sum())
    if any(room < 0 for room in left.values()):
        return ()
    found: dict[int, Ownership] = {}
    needs = {h: max(float(state[layers].sum()), 1.0) for h, layers in sets.items()}
    for holders in sorted(sets, key=lambda h: sum(left[d] for d in h) / needs[h]):
        names = [d for d in plan.devices if d in holders]
        caps = [min(int(left[d] / needs[holders] * WHOLE), WHOLE) for d in names]
        parts = filled(caps, [1.0] * len(names), WHOLE)
        if parts is None:
            return ()
        small = next(iter(simple(parts, caps, WHOLE)), parts)
        for d, part in zip(names, small, strict=True):
            left[d] -= part / sum(small) * needs[holders]
        by = math.gcd(*small)
        row = {d: part // by for d, part in zip(names, small, strict=True)}
        for i in sets[holders]:
            found[i] = Ownership(layer=model.profile.layers[i].name, parts=row, held=held)
    return tuple(found[i] for i in sorted(found))


def _schedule(plan: Plan, held: Held) -> str:
    """Gradients in parts need whole backwards."""
    return "1f1b" if held == "gradients" and plan.schedule in ("zero-bubble", "unequal") else plan.schedule


def _has_several(plan: Plan) -> bool:
    names = [d for _, _, stage in plan.numbered_stages() for x in stage.shares for d in x.devices]
    return len(set(names)) < len(names)


def _sentence(plan: Plan, held: Held) -> str:
    """Example: "the optimiser's state in parts by memory among the devices that hold a layer (a/0 40%)"."""
    shares = ", ".join(f"{d} {part:.0%}" for d, part in shares_of_state(plan).items())
    return f"{WORDS[held]} in parts by memory among the devices that hold a layer ({shares})"


def _prediction(model: CostModel, plan: Plan, cost: PlanCost, before: Prediction) -> Prediction:
    """What was told of the shape, with the seconds and bytes that it has with its parts."""
    lower_s, upper_s = bounds_of(model, plan, cost.step_s)
    return replace(
        before,
        step_s=cost.step_s,
        lower_s=lower_s,
        upper_s=upper_s,
        memory_bytes={n: int(b) for n, b in cost.memory_bytes.items()},
        seconds=cost.seconds,
        owned_bytes=StagedOwners(model=model, plan=plan).owned_bytes(),
    )
