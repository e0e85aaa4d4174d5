"""`evener simulate`: plays a plan in time, with faults, without hardware and without torch."""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from evener import schedules
from evener.cli.options import AsJson, MemoryMargin
from evener.core.catalogue import read_fleet
from evener.core.faults import Fault, FaultScript, parse_faults
from evener.core.files import read, write_bytes
from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.core.trace import CAUSES
from evener.core.words import counted
from evener.cost.evaluate import CostModel
from evener.errors import PlanMismatchError, UsageError
from evener.planner import plan as best_plan
from evener.planner.links import UNLINKED, check_links
from evener.report.chrome import chrome_trace
from evener.report.tables import duration, percent, render, size, table
from evener.sim import Run, World, plan_costs, play, shrink

SCHEDULES = ", ".join(schedules.NAMES)


def simulate(
    plan: Annotated[Path, typer.Argument(help="Plan file, from `evener plan -o` or written by hand.")],
    fleet: Annotated[Path, typer.Option(help="Fleet file: devices and links, also those that join later.")],
    profile: Annotated[Path, typer.Option(help="Profile file, from `evener profile`.")],
    schedule: Annotated[
        str | None, typer.Option(help=f"Another schedule than the plan's: {SCHEDULES}.")
    ] = None,
    faults: Annotated[
        str,
        typer.Option(
            help="Trouble, in order: 'slow lab1/gpu0 x3 at step 40; leave lab2/gpu1 at 80; "
            "join lab3/gpu0 at 120; cut lab1|lab2 at 150 for 5s; oom lab1/gpu1 at 160'."
        ),
    ] = "",
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps to play.")] = 1,
    memory_margin: MemoryMargin = 0.1,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the trace as Chrome-trace JSON (Perfetto).")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="unlinked: data between devices without a link costs nothing.")
    ] = None,
    rows: Annotated[
        bool, typer.Option("--rows", help="Print the schedule's rows, device by device.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Play a plan without hardware: predicted times, device by device."""
    chosen = read(plan, Plan)
    devices, measured = read_fleet(fleet), read(profile, Profile)
    _check_fits(chosen, devices, measured)
    if UNLINKED not in (allow or ()):
        check_links(devices, chosen)
    if schedule is not None and schedule not in schedules.NAMES:
        raise UsageError(f"no schedule is called {schedule!r}", remedy=f"one of {SCHEDULES}")
    name = schedule or chosen.schedule
    world = _world(CostModel(fleet=devices, profile=measured), name, memory_margin)
    script = parse_faults(faults)
    _check_faults(script, devices)
    run = play(chosen, world, steps=steps, faults=script)
    if output is not None:
        write_bytes(output, chrome_trace(run.trace))
        print(f"written to {output}", file=sys.stderr)
    costs = world.costs_of(chosen)
    limits = {d: m.limit_bytes for d, m in costs.memory.items()}
    stream = sys.stderr if as_json else sys.stdout
    print(_text(chosen, name, run, limits), end="", file=stream)
    if rows:
        print(world.schedule_of(chosen, costs), end="", file=stream)
    if as_json:
        print(json.dumps(_object(chosen, name, run, limits)))


def _world(model: CostModel, schedule: str, memory_margin: float) -> World:
    def replan(plan: Plan, fault: Fault) -> tuple[Plan, str]:
        if fault.type != "join":
            return shrink(plan, fault)
        names = tuple(d.name for d in model.fleet.devices if d.name in {*plan.devices, fault.device})
        job = Job(global_batch=plan.global_batch, memory_margin=memory_margin, allow=(UNLINKED,))
        result = best_plan(model.fleet.only(names), model.profile, job, shapes="auto")
        return result.plan, f"planned anew over {counted(len(names), 'device')}"

    return World(
        costs_of=lambda plan: plan_costs(model, plan, memory_margin=memory_margin),
        schedule_of=lambda plan, costs: schedules.make(plan, name=schedule, costs=costs),
        replan=replan,
    )


def _check_fits(plan: Plan, fleet: Fleet, profile: Profile) -> None:
    """The three files must speak of the same devices and layers."""
    here = {d.name for d in fleet.devices}
    strangers = [name for name in plan.devices if name not in here]
    if strangers:
        raise PlanMismatchError(
            f"the plan uses {', '.join(strangers)}, which the fleet does not have",
            numbers=f"devices of the fleet: {', '.join(sorted(here))}",
            remedy="the fleet file that the plan was made for",
        )
    known = [layer.name for layer in profile.layers]
    for number, pipeline in enumerate(plan.pipelines):
        placed = [name for stage in pipeline.stages for name in stage.layers]
        if placed != known:
            wrong = sorted(set(placed) ^ set(known)) or placed
            raise PlanMismatchError(
                f"pipeline {number} does not hold the profile's layers in their order",
                numbers=f"{len(placed)} placed, {len(known)} profiled; they differ in {', '.join(wrong[:5])}",
                remedy="the profile that the plan was made from",
            )


def _check_faults(script: FaultScript, fleet: Fleet) -> None:
    """Names must be of the fleet, whether the plan uses them at that time or not."""
    for fault in script.faults:
        hosts = {d.host for d in fleet.devices} if fault.type == "cut" else set()
        for name in (fault.device, fault.other):
            if name is not None and name not in hosts:
                fleet.device(name)


def _text(plan: Plan, schedule: str, run: Run, limits: dict[str, float | None]) -> str:
    steps = len(run.barriers_s)
    used = list(dict.fromkeys(span.device for span in run.trace.spans))
    whole = run.barriers_s[-1]
    body = []
    for device in used:
        seconds = run.trace.seconds_by_cause(device)
        limit = limits.get(device)
        peak = run.peak_bytes.get(device)
        held = size(peak) if peak else "unknown"
        body.append(
            [
                device,
                *(percent(seconds[cause] / whole) if seconds[cause] else "" for cause in CAUSES),
                held + (" (too much)" if peak and limit is not None and peak > limit else ""),
                size(limit) if limit is not None else "unknown",
            ]
        )
    lines = [
        f"{schedule}: {counted(steps, 'step')} of {counted(plan.global_batch, 'sample')} in "
        f"{duration(whole)}; median step {duration(median(run.step_s))}"
    ]
    text = render(*lines, table(["device", *CAUSES, "peak memory", "limit"], body))
    return text + "".join(f"{line}\n" for line in (*run.log, *(f"note: {n}" for n in run.notes)))


def _object(plan: Plan, schedule: str, run: Run, limits: dict[str, float | None]) -> dict[str, Any]:
    used = list(dict.fromkeys(span.device for span in run.trace.spans))
    return {
        "schedule": schedule,
        "steps": len(run.barriers_s),
        "predicted_step_s": median(run.step_s),
        "predicted_total_s": run.barriers_s[-1],
        "step_s_first": run.step_s[0],
        "step_s_last": run.step_s[-1],
        "predicted_samples_per_s": plan.global_batch * len(run.barriers_s) / run.barriers_s[-1],
        "seconds": {device: run.trace.seconds_by_cause(device) for device in used},
        "memory_bytes": run.peak_bytes,
        "memory_limit_bytes": limits,
        "log": list(run.log),
        "notes": list(run.notes),
    }
