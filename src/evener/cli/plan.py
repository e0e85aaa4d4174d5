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

from evener.core.catalogue import read_fleet
from evener.core.files import read, write
from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.core.profile import Profile
from evener.errors import NoPlanFitsError, UsageError
from evener.planner import Alternative, PlanResult
from evener.planner import plan as best_plan
from evener.planner.choose import Shapes
from evener.planner.groups import gib, ms
from evener.planner.what_if import SPELLING, World, changed, usual_changes

Objective = Literal["time", "money"]


def plan(
    fleet: Annotated[Path, typer.Argument(help="Fleet file, from `evener probe` or written by hand.")],
    profile: Annotated[Path, typer.Argument(help="Profile file, from `evener profile`.")],
    batch: Annotated[int | None, typer.Option("--batch", "-b", help="Samples of an optimiser step.")] = None,
    batch_per_device: Annotated[
        str | None,
        typer.Option(help="Your own split: 2,2,2,15 in the order of the fleet, or host/gpu0=2,host/cpu=15."),
    ] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Samples a device computes at once.")] = None,
    memory_margin: Annotated[float, typer.Option(help="Part of each memory that stays free.")] = 0.1,
    keep_all: Annotated[
        bool, typer.Option("--keep-all", help="Use every device, also one that slows the job.")
    ] = False,
    shapes: Annotated[
        Shapes, typer.Option(help="What to consider; auto: pipelines only if no device holds the model.")
    ] = "auto",
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
        bool, typer.Option("--explain", help="Also plan with faster links and one more device of each kind.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the plan to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Find the best plan for a fleet and a profile, and say why."""
    devices, measured = read_fleet(fleet), read(profile, Profile)
    job = job_from(
        devices,
        batch,
        batch_per_device,
        micro_batch=micro_batch,
        memory_margin=memory_margin,
        keep_all=keep_all,
        place=parse_place(place or []),
        objective=objective,
        max_step_s=max_step,
        max_price_per_hour=max_price,
    )
    result = best_plan(devices, measured, job, shapes=shapes)
    changes = [*(what_if or []), *(usual_changes(devices) if explain else ())]
    worlds = [_what_if(World(fleet=devices, profile=measured), x, job, shapes) for x in changes]
    result = replace(result, alternatives=(*result.alternatives, *worlds))
    if output is not None:
        write(output, result.plan)
    show(result, Console(file=sys.stderr if as_json else sys.stdout, highlight=False))
    if as_json:
        print(json.dumps(as_object(result)))


def _what_if(world: World, change: str, job: Job, shapes: Shapes) -> Alternative:
    """The best plan of a changed world, as an alternative."""
    other = changed(world, change)
    try:
        found = best_plan(other.fleet, other.profile, job, shapes=shapes).plan
    except NoPlanFitsError as e:
        return Alternative(name=f"what if {change}", note=f"{e.what} ({e.numbers})")
    assert found.prediction is not None
    return Alternative(
        name=f"what if {change}", step_s=found.prediction.step_s, samples=found.samples_by_device()
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
    split = parse_split(fleet, batch_per_device) if batch_per_device else None
    if batch is None and split is None:
        raise UsageError("no batch is given", remedy="--batch N, or --batch-per-device 2,2,2,15")
    try:
        total = sum(split.values()) if split and batch is None else batch
        return Job(global_batch=total, batch_per_device=split, **wishes)  # type: ignore[arg-type]
    except ValueError as e:
        raise UsageError(str(e), remedy="numbers that agree with each other") from e


def parse_split(fleet: Fleet, text: str) -> dict[str, int]:
    """Samples by device from "2,2,15" (one for each device of the fleet, in order) or "name=2,name=15"."""
    names = [d.name for d in fleet.devices]
    words = [w.strip() for w in text.split(",") if w.strip()]
    named = [w.rpartition("=") for w in words]
    try:
        if all(equals for _, equals, _ in named):
            return {name: int(number) for name, _, number in named}
        numbers = [int(w) for w in words]
    except ValueError as e:
        raise UsageError(
            f"cannot read the split {text!r}", remedy="2,2,2,15 or host/gpu0=2,host/cpu=15"
        ) from e
    if len(numbers) != len(names):
        raise UsageError(
            f"the split has {len(numbers)} numbers, the fleet {len(names)} devices",
            numbers=", ".join(names),
            remedy="one number for each device (0 for none), or name=number",
        )
    return dict(zip(names, numbers, strict=True))


def as_object(result: PlanResult) -> dict[str, Any]:
    """The JSON of a result; its keys are promised."""
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
    }


def show(result: PlanResult, console: Console) -> None:
    """Who does what, how long, how sure, what else there is."""
    plan, prediction = result.plan, result.plan.prediction
    assert prediction is not None
    table = Table(title=f"Plan for {plan.global_batch} samples a step", title_justify="left")
    for head in ("device", "layers", "samples", "micro-batch", "memory", "busy"):
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
                    str(share.samples),
                    gib(prediction.memory_bytes[name]) if prediction.memory_bytes.get(name) else "unknown",
                    f"{busy / prediction.step_s:.0%}" if causes else "",
                )
    console.print(table)
    proof = {"proven": "no plan is faster", "within": f"no plan is more than {result.gap:.2%} faster"}
    sure = proof.get(result.status, f"search stopped early, at most {result.gap:.2%} from the best")
    console.print(
        f"a step takes {ms(prediction.step_s)} ({ms(prediction.lower_s)} to {ms(prediction.upper_s)}), "
        f"{plan.global_batch / prediction.step_s:.4g} samples/s; {sure}"
    )
    console.print(f"limit: {result.limiter}")
    for x in plan.left_out:
        console.print(f"left out: {x.device}: {x.reason}")
    for reason in result.reasons:
        console.print(reason)
    for other in result.alternatives:
        seconds = ms(other.step_s) if other.step_s else other.note
        if other.name.startswith("what if"):
            change = f" ({other.step_s / prediction.step_s - 1:+.1%})" if other.step_s else ""
            console.print(f"{other.name}: {seconds}{change}")
        else:
            console.print(f"instead, {other.name}: {seconds}")
