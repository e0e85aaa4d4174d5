"""`evener plan`: a fleet and a profile in, a plan with its reasons out. Never imports torch."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from evener.cli.options import (
    Allow,
    AsJson,
    Batch,
    BatchPerDevice,
    Compress,
    FewerExchanges,
    FleetFile,
    KeepAll,
    Memory,
    MemoryMargin,
    MicroBatch,
    Model,
    ModelPrecision,
    ProfileFile,
    ShapesWanted,
    StateWanted,
    SumsWanted,
    names_in,
)
from evener.core.budgets import with_budgets
from evener.core.catalogue import read_fleet
from evener.core.fewer import fewer_in
from evener.core.files import check_target, read, write
from evener.core.fleet import Fleet
from evener.core.job import Job, Shapes
from evener.core.ownership import WORDS, held_by, shares_of_state
from evener.core.plan import Pipeline, Plan
from evener.core.profile import Profile
from evener.core.split import split_of
from evener.core.tell import waiting
from evener.core.words import counted
from evener.errors import NoPlanFitsError, UnknownNameError, UsageError
from evener.planner import Alternative, PlanResult
from evener.planner import plan as best_plan
from evener.planner.explain import Advice, advice
from evener.planner.groups import gib, ms
from evener.planner.what_if import SPELLING, World, changed, usual_changes

Objective = Literal["time", "money"]


def plan(
    fleet: FleetFile,
    profile: ProfileFile = None,
    batch: Batch = None,
    model: Model = None,
    precision: ModelPrecision = "float32",
    batch_per_device: BatchPerDevice = None,
    micro_batch: MicroBatch = None,
    memory: Memory = None,
    memory_margin: MemoryMargin = 0.1,
    keep_all: KeepAll = False,
    shapes: ShapesWanted = "auto",
    allow: Allow = None,
    sums: SumsWanted = "auto",
    compress: Compress = None,
    state: StateWanted = "replicated",
    fewer: FewerExchanges = None,
    place: Annotated[
        list[str] | None,
        typer.Option(help="Where layers run: blocks.0-5=lab1/gpu0, embed=KIND, head=cpu. May be repeated."),
    ] = None,
    objective: Annotated[
        Objective, typer.Option(help="What to make small: seconds or money a step.")
    ] = "time",
    max_step: Annotated[float | None, typer.Option(help="Seconds a step at most.")] = None,
    max_price: Annotated[float | None, typer.Option(help="Price an hour at most, all devices.")] = None,
    what_if: Annotated[
        list[str] | None, typer.Option(help=f"Also plan a changed fleet: {SPELLING}. May be repeated.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also plan with faster links, a larger batch, one more device.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the plan to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the best plan for a fleet and a profile, and say why."""
    check_target(output)
    devices = with_budgets(read_fleet(fleet), memory or ())
    job = job_from(
        devices,
        batch,
        batch_per_device,
        micro_batch=micro_batch,
        memory_margin=memory_margin,
        keep_all=keep_all,
        place=parse_place(place or []),
        allow=tuple(allow or ()),
        sums=sums,
        compress=names_in(compress),
        state=state,
        fewer=fewer_in(names_in(fewer)),
        objective=objective,
        max_step_s=max_step,
        max_price_per_hour=max_price,
    )
    world = world_of(devices, profile, model, precision, job)
    result = solved(world, job, shapes)
    told: tuple[Advice, ...] = ()
    if explain:
        result = with_usual_ways(world, result, job)
        told = advice(result, [_what_if(world, x, job, shapes) for x in usual_changes(devices)])
    worlds = [_what_if(world, x, job, shapes) for x in what_if or []]
    result = replace(result, alternatives=(*result.alternatives, *worlds))
    if model is not None and precision != "float32":
        result = replace(result, plan=in_precision(result.plan, precision))
    if output is not None:
        write(output, result.plan)
    show(result, Console(file=sys.stderr if as_json else sys.stdout, highlight=False), told)
    if output is not None:
        print(f"written to {output}", file=sys.stderr)
    if as_json:
        print(json.dumps(as_object(result, told)))


def world_of(fleet: Fleet, profile: Path | None, model: str | None, precision: str, job: Job) -> World:
    """The fleet with the measured profile, or with one assumed from the configuration of `model`.

    UsageError unless exactly one of the two is given.
    """
    if (profile is None) == (model is None):
        what = "neither profile nor --model is given" if model is None else "profile and --model are given"
        raise UsageError(what, remedy="FLEET PROFILE, or FLEET --model gpt2")
    if profile is not None:
        return World(fleet=fleet, profile=read(profile, Profile))
    from evener.core.transformer import transformer  # only when wanted: a measured profile answers without
    from evener.cost.from_config import profile_from_config

    shapes = transformer(model or "")

    def reprofile(fleet: Fleet) -> Profile:
        return profile_from_config(shapes, fleet, global_batch=job.global_batch, precision=precision)

    return World(fleet=fleet, profile=reprofile(fleet), reprofile=reprofile)


def solved(world: World, job: Job, shapes: Shapes) -> PlanResult:
    """The best plan of a world, its global batch times the world's."""
    if world.batch != 1:
        if job.batch_per_device is not None:
            raise UsageError("a given split does not say how a larger batch is split", remedy="--batch N")
        job = replace(job, global_batch=max(1, round(job.global_batch * world.batch)))
    work = f"{counted(job.global_batch, 'sample')} a step on {counted(len(world.fleet.devices), 'device')}"
    with waiting(f"still planning {work}"):
        return best_plan(world.fleet, world.profile, job, shapes=shapes)


def in_precision(plan: Plan, precision: str) -> Plan:
    """The plan with the precision of every stage's matrix products written down."""

    def of(pipeline: Pipeline) -> Pipeline:
        return replace(pipeline, stages=tuple(replace(s, precision=precision) for s in pipeline.stages))

    return replace(plan, pipelines=tuple(of(p) for p in plan.pipelines))


def with_usual_ways(world: World, result: PlanResult, job: Job) -> PlanResult:
    """The result with what people do without a planner, where the profile times layers and it is missing."""
    known = {a.name for a in result.alternatives}
    if not world.profile.timings or job.batch_per_device is not None or "even pipeline" in known:
        return result
    from evener.planner.baselines import usual_ways

    ways = usual_ways(world.fleet, world.profile, job)
    return replace(result, alternatives=(*result.alternatives, *(a for a in ways if a.name not in known)))


def _what_if(world: World, change: str, job: Job, shapes: Shapes) -> Alternative:
    """The best plan of a changed world, as an alternative; the reason where it has none."""
    other = changed(world, change)
    try:
        found = solved(other, job, shapes).plan
    except (NoPlanFitsError, UnknownNameError) as e:
        return Alternative(name=f"what if {change}", note=f"{e.what} ({e.numbers})")
    assert found.prediction is not None
    return Alternative(
        name=f"what if {change}",
        step_s=found.prediction.step_s,
        samples=found.samples_by_device(),
        global_batch=found.global_batch if found.global_batch != job.global_batch else None,
    )


def parse_place(words: list[str]) -> dict[str, str]:
    """Wishes from "pattern=target". UsageError for another spelling."""
    wishes = {}
    for word in words:
        pattern, equals, target = word.partition("=")
        if not (pattern and equals and target):
            raise UsageError(f"cannot read the wish {word!r}", remedy="blocks.0-5=lab1/gpu0 or head=cpu")
        wishes[pattern] = target
    return wishes


def job_from(fleet: Fleet, batch: int | None, batch_per_device: str | None, **wishes: Any) -> Job:
    """The job of the command line. UsageError when the parts do not add up.

    Example: a fleet of a/0 and a/1 with batch_per_device "3,1" is a global batch of 4.
    """
    split = split_of(batch_per_device, fleet)
    if batch is None and split is None:
        raise UsageError("no batch is given", remedy="--batch N, or --batch-per-device 2,2,2,15")
    total = sum(split.values()) if split and batch is None else batch
    return Job(global_batch=total, batch_per_device=split, **wishes)  # type: ignore[arg-type]


def as_object(result: PlanResult, told: tuple[Advice, ...] = ()) -> dict[str, Any]:
    """The JSON of a result, and of what was told to help; its keys are promised."""
    plan, prediction = result.plan, result.plan.prediction
    assert prediction is not None
    return {
        "plan": msgspec.to_builtins(plan),
        "predicted_step_s": prediction.step_s,
        "lower_step_s": prediction.lower_s,
        "upper_step_s": prediction.upper_s,
        "bound_step_s": result.bound_s,
        "memory_bytes": prediction.memory_bytes,
        "left_out": [{"device": x.device, "reason": x.reason} for x in plan.left_out],
        "status": result.status,
        "gap": result.gap,
        "limiter": result.limiter,
        "reasons": list(result.reasons),
        "alternatives": msgspec.to_builtins(result.alternatives),
        "samples_by_device": plan.samples_by_device(),
        "source": prediction.source,
        "advice": [{f: getattr(a, f) for f in a.__struct_fields__} for a in told],
    }


def show(result: PlanResult, console: Console, told: tuple[Advice, ...] = ()) -> None:
    """Who does what, how long, how sure, what limits, what else there is, what would help."""
    plan, prediction = result.plan, result.plan.prediction
    assert prediction is not None
    table = Table(title=f"Plan for {counted(plan.global_batch, 'sample')} a step", title_justify="left")
    parts = shares_of_state(plan)
    kept = ["state"] if parts else []
    for head in ("device", "layers", "samples", "micro-batch", *kept, "memory", "busy"):
        table.add_column(head, justify="left" if head in ("device", "layers") else "right")
    taken = plan.samples_by_device()
    for _, which, stage in plan.numbered_stages():
        pipeline = plan.pipelines[which]
        for share in stage.shares:
            for name in share.devices:
                causes = prediction.seconds.get(name, {})
                busy = sum(
                    s for cause, s in causes.items() if cause not in ("wait", "bubble", "transfer", "reduce")
                )
                first, last = stage.layers[0], stage.layers[-1]
                table.add_row(
                    name,
                    f"all {len(stage.layers)}" if len(pipeline.stages) == 1 else f"{first} .. {last}",
                    str(taken[name]),
                    str(share.samples) if pipeline.samples else "",
                    *([f"{parts[name]:.1%}, {gib(prediction.owned_bytes.get(name, 0))}"] if parts else []),
                    gib(prediction.memory_bytes[name]) if prediction.memory_bytes.get(name) else "unknown",
                    f"{busy / prediction.step_s:.0%}" if causes else "",
                )
    console.print(table)
    proof = {
        "proven": "no plan is faster",
        "within": f"no plan is more than {result.gap:.2%} faster",
        "given": "the split is the one given, no other was looked for",
    }
    sure = proof.get(result.status, f"search stopped early, at most {result.gap:.2%} from the best")
    console.print(
        f"a step takes {ms(prediction.step_s)} ({ms(prediction.lower_s)} to {ms(prediction.upper_s)}), "
        f"{plan.global_batch / prediction.step_s:.4g} samples/s; {sure}"
    )
    if prediction.source == "assumed":
        console.print("assumed: no second of this was measured")
    console.print(f"limit: {result.limiter}")
    if parts:
        console.print(f"state: {WORDS[held_by(plan) or '']} in parts")
    for r in plan.reductions if len(plan.reductions) > 1 else ():
        console.print(f"gradients: {', '.join(r.devices)}: {r.reason}")
    for sentence in plan.inexact:
        console.print(f"not exact: {sentence}")
    for x in plan.left_out:
        console.print(f"left out: {x.device}: {x.reason}")
    for reason in result.reasons:
        console.print(reason)
    for other in result.alternatives:
        told_of = f" ({other.note})" if other.note else ""
        seconds = ms(other.step_s) + told_of if other.step_s else other.note
        if other.name.startswith("what if"):
            batch = other.global_batch or plan.global_batch
            faster = batch / other.step_s / (plan.global_batch / prediction.step_s) - 1 if other.step_s else 0
            gain = f" ({faster:+.1%} samples/s)" if other.step_s else ""
            console.print(f"{other.name}: {seconds}{gain}")
        else:
            console.print(f"instead, {other.name}: {seconds}")
    for a in told:
        console.print(a.sentence)
