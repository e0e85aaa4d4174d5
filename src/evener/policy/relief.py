"""A device of a running job ran out of memory: smaller micro-batches, or recompute? By what each would cost.

smaller     8 samples at once become 4: half the activations, more actions, each less efficient
recompute   a stage keeps what enters it alone: one micro-batch's activations instead of all in flight, and
            one forward more for each
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace as replaced

from msgspec.structs import replace

from evener.core.order import with_micro_batch
from evener.core.ownership import held_by
from evener.core.plan import Pipeline, Plan, Stage
from evener.cost.evaluate import CostModel, PlanCost, evaluate
from evener.cost.memory import usable_bytes
from evener.errors import EvenerError
from evener.planner.groups import gib, ms
from evener.policy.adapt import Decision


def relieve(plan: Plan, short: Sequence[str], model: CostModel | None = None) -> Decision:
    """The plan with which a step in which devices `short` ran out of memory is redone, and why that one.

    With `model` both ways are priced: of those that need less memory on all of `short` and should fit, the
    faster. Where neither should fit, the one that needs less; without prices smaller micro-batches, which
    always need less. "keep" when there is no way left. Example: 1F1B over two devices in micro-batches of 8
    that take 100 ms a step; in fours 112 ms, the first stage recomputed 115 ms: fours.
    """
    ways: dict[str, Plan] = {}
    smaller = _smaller(plan, short)
    if smaller is not None:
        ways["micro-batches"] = smaller
    # Parameters that are gathered once a forward are not there for running it again.
    again = None if held_by(plan) == "parameters" else _recomputed(plan, short)
    if again is not None:
        ways["recompute"] = again
    what = f"{', '.join(short)} ran out of memory with micro-batch {_sizes(plan, short)}"
    if not ways:
        why = f"{', '.join(short)} runs out of memory even with one sample at a time"
        return Decision(do="keep", plan=plan, why=why)
    prices, unpriced = _prices(model, plan, ways)
    prices = _with_the_rest(prices, plan)
    do, reason = _chosen(ways, prices, short, model) if model and prices else (next(iter(ways)), "")
    if unpriced and len(ways) > 1:
        reason = f" (recompute was not priced: {unpriced})"
    told = f"{what}; all redo the step, it goes on with {_words(do, ways[do], plan, short)}{reason}"
    better = ways[do]
    if prices and plan.prediction is not None:
        better = _with_prediction(better, prices["now"], prices[do])
    return Decision(do=do, plan=better, why=told)  # type: ignore[arg-type]


def _chosen(
    ways: Mapping[str, Plan],
    prices: Mapping[str, PlanCost],
    short: Sequence[str],
    model: CostModel,
) -> tuple[str, str]:
    """(way, the reason in words that continue a sentence)."""
    rooms = {name: usable_bytes(model.fleet.device(name), 0.0) for name in short}

    def held(way: str, name: str) -> float:
        return prices[way].memory_bytes[name]

    less = [w for w in ways if all(held(w, n) < held("now", n) for n in short)]
    fits = [w for w in less if all(held(w, n) <= rooms[n] for n in short)]
    if fits:
        best = min(fits, key=lambda w: prices[w].step_s)
    else:
        best = min(less or list(ways), key=lambda w: max(held(w, n) / held("now", n) for n in short))
    others = [f"; {_name(w)} {_price(prices[w], short)}" for w in ways if w != best]
    return best, f", predicted {_price(prices[best], short)}{''.join(others)}"


def _prices(model: CostModel | None, plan: Plan, ways: Mapping[str, Plan]) -> tuple[dict[str, PlanCost], str]:
    """What each way and the plan "now" cost; nothing, and why, where the profile does not reach."""
    if model is None:
        return {}, "nothing of the model was measured here"
    try:
        return {name: evaluate(model, p) for name, p in {"now": plan, **ways}.items()}, ""
    except EvenerError as e:
        return {}, e.what


def _with_the_rest(prices: Mapping[str, PlanCost], plan: Plan) -> dict[str, PlanCost]:
    """The prices with what the plan's own prediction counts beyond them, rows of tables say: it stays."""
    told = plan.prediction.memory_bytes if plan.prediction else {}
    now = prices["now"].memory_bytes if prices else {}
    rest = {name: max(told.get(name, 0) - held, 0.0) for name, held in now.items()}
    return {
        way: replaced(p, memory_bytes={n: b + rest.get(n, 0.0) for n, b in p.memory_bytes.items()})
        for way, p in prices.items()
    }


def _smaller(plan: Plan, short: Sequence[str]) -> Plan | None:
    """Half the micro-batch in every pipeline of `short`; None where one has no smaller."""
    pipelines = list(plan.pipelines)
    for i, pipeline in enumerate(pipelines):
        if set(short) & set(pipeline.devices):
            least = max(len(stage.shares) for stage in pipeline.stages)
            if pipeline.micro_batch == least:
                return None
            pipelines[i] = with_micro_batch(pipeline, max(pipeline.micro_batch // 2, least))
    return replace(plan, pipelines=tuple(pipelines))


def _recomputed(plan: Plan, short: Sequence[str]) -> Plan | None:
    """Recompute in each stage of `short` that has several micro-batches in flight; None where one has none.

    With one in flight nothing is gained: its backward needs all activations again.
    """
    helped: set[str] = set()
    pipelines = []
    for pipeline in plan.pipelines:
        stages = []
        for place, stage in enumerate(pipeline.stages):
            devices = {n for share in stage.shares for n in share.devices} & set(short)
            if devices and _can_recompute(plan, pipeline, place, stage):
                stage = replace(stage, recompute=True)
                helped |= devices
            stages.append(stage)
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    return replace(plan, pipelines=tuple(pipelines)) if helped == set(short) else None


def _can_recompute(plan: Plan, pipeline: Pipeline, place: int, stage: Stage) -> bool:
    in_flight = len(pipeline.micro_batch_sizes)
    if plan.schedule != "gpipe":
        in_flight = min(in_flight, len(pipeline.stages) - place)
    return in_flight > 1 and len(pipeline.stages) > 1 and not stage.recompute and stage.residence is None


def _with_prediction(plan: Plan, before: PlanCost, after: PlanCost) -> Plan:
    """The plan with what it is predicted to take; its bounds are as far off as they were."""
    old = plan.prediction
    assert old is not None
    times = after.step_s / before.step_s
    prediction = replace(
        old,
        step_s=after.step_s,
        lower_s=min(old.lower_s * times, after.step_s),
        upper_s=max(old.upper_s * times, after.step_s),
        seconds=after.seconds,
        memory_bytes={name: round(b) for name, b in after.memory_bytes.items()},
    )
    return replace(plan, prediction=prediction)


def _sizes(plan: Plan, short: Sequence[str]) -> str:
    sizes = [p.micro_batch for p in plan.pipelines if set(short) & set(p.devices)]
    return ", ".join(map(str, dict.fromkeys(sizes)))


def _words(do: str, better: Plan, plan: Plan, short: Sequence[str]) -> str:
    if do == "micro-batches":
        return _sizes(better, short)
    pairs = zip(better.numbered_stages(), plan.numbered_stages(), strict=True)
    stages = [str(n) for (n, _, now), (_, _, before) in pairs if now.recompute and not before.recompute]
    return f"recompute in stage {', '.join(stages)}"


def _name(way: str) -> str:
    return "smaller micro-batches" if way == "micro-batches" else "recompute"


def _price(cost: PlanCost, short: Sequence[str]) -> str:
    held = ", ".join(f"{gib(cost.memory_bytes[n])} on {n}" for n in short)
    return f"{ms(cost.step_s)} a step and {held}"
