"""What one process of a job does, from meeting the others to the report.

open device → load recipe → measure (each kind once) → plan (first process) → join group → steps → report
"""

import dataclasses
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

from evener.core.actions import Schedule
from evener.core.figures import Value
from evener.core.files import write
from evener.core.fleet import Fleet
from evener.core.plan import Plan
from evener.core.trace import Trace
from evener.core.words import counted
from evener.errors import EvenerError, PeerLostError
from evener.rehearsal.verdict import Lateness
from evener.runtime.batchnorm import replace_batchnorm
from evener.runtime.ranks import Ranks
from evener.runtime.replicas import checksums, collect, spread_state
from evener.session.adapting import adapter_of
from evener.session.conclude import Journal, Outcome
from evener.session.decide import check_plan, choose_plan, samples_to_train, with_inexact
from evener.session.heldout import evaluate_heldout
from evener.session.keep import keep_first_gradient, load_weights, save_parameters
from evener.session.layout import lay_out
from evener.session.measure import measured_link, micro_batch_grid, profile_together
from evener.session.meeting import Failure, Meeting
from evener.session.recipe import Recipe, in_dtype, load_recipe, with_keys, without_dropout
from evener.session.request import Request
from evener.session.scripted import scripted
from evener.session.site import Site, backend_of, site_of
from evener.session.steps import Steps
from evener.session.tables import place_tables, table_names, take_out
from evener.session.timetable import agreed_schedules, step_sizes


def guarded_work(request: Request, meeting: Meeting, recipe: Recipe | None = None) -> Outcome | None:
    """`work`, telling the other processes why, should it fail; raises the first failure of the job."""
    name = request.fleet.devices[meeting.rank].name
    try:
        return work(request, meeting, recipe)
    except PeerLostError as e:
        cause = meeting.wait_for_failure()
        if cause is None:
            raise
        raise cause.as_error() from e
    except EvenerError as e:
        meeting.report_failure(failure_of(name, e))
        raise
    except Exception as e:
        what = f"{name} stopped on an unexpected {type(e).__name__}: {e}"
        meeting.report_failure(Failure(device=name, code="EV000", exit_code=2, what=what))
        raise


def failure_of(name: str, error: EvenerError) -> Failure:
    """The failure of device `name` as the other processes read it."""
    return Failure(
        device=name,
        code=error.code,
        exit_code=error.exit_code,
        what=error.what,
        numbers=error.numbers,
        remedy=error.remedy,
    )


def work(request: Request, meeting: Meeting, recipe: Recipe | None = None) -> Outcome | None:
    """Run this process's part; the outcome on the leading process, None elsewhere.

    A recipe that is handed in stays with the caller, so its model ends trained in every process.
    """
    handed_in = recipe is not None
    site = site_of(request, meeting.rank)
    recipe = _prepared(recipe or load_recipe(request.script, request.seed), request, site)
    fleet, plan, made = _agreed_plan(request, meeting, recipe, site)
    # Group order is fleet order, so that the job's first process leads wherever it takes part.
    used = tuple(d.name for d in fleet.devices if d.name in plan.devices)
    shared_tables = len(used) > 1 and bool(table_names(recipe))
    hands_on = handed_in and (len(used) < len(fleet.devices) or not plan.is_data_parallel or shared_tables)
    if site.device.name not in used:
        take_out(recipe.model)
        if hands_on:
            _hand_on(meeting, recipe.model, fleet, leader=used[0], here=site.device.name)
        return None
    ranks = Ranks(used, site.device.name)
    if len(used) > 1:
        members = tuple(i for i, d in enumerate(fleet.devices) if d.name in used)
        meeting.join_group(members, 1, backend_of(fleet, used))
        spread_state(recipe.model)
    try:
        layout = lay_out(recipe, plan, ranks, site, fleet, meeting, rehearse=request.rehearse)
        steps = Steps(recipe, plan, ranks, site, layout, request.seed, made)
        _prepare_for_change(request, fleet, steps)
        outcome = _train(request, meeting, recipe, steps)
    finally:
        take_out(recipe.model)
        meeting.leave_group()
    if hands_on:
        _hand_on(meeting, recipe.model, fleet, leader=used[0], here=site.device.name)
    return outcome


def _hand_on(meeting: Meeting, model: nn.Module, fleet: Fleet, *, leader: str, here: str) -> None:
    """Give the trained model to every process of the job, also to those that the plan left out."""
    if here == leader:
        meeting.put("trained", True)
    meeting.get("trained", bool, timeout=timedelta(days=365))
    names = [d.name for d in fleet.devices]
    members = sorted(range(len(names)), key=lambda i: names[i] != leader)  # the leader first
    meeting.join_group(tuple(members), 2, "gloo")
    spread_state(model)
    meeting.leave_group()


def _prepared(recipe: Recipe, request: Request, site: Site) -> Recipe:
    if request.global_batch:
        recipe = dataclasses.replace(recipe, global_batch=request.global_batch)
    if request.weights:
        load_weights(recipe.model, request.weights)
    if request.dtype:
        recipe = in_dtype(recipe, getattr(torch, request.dtype))
    recipe = with_keys(recipe, request.seed)
    if recipe.batch_norm == "wave":
        replace_batchnorm(recipe.model)
    if not request.dropout:
        recipe = without_dropout(recipe)
    recipe.model.train()
    place_tables(recipe)
    return recipe


def _agreed_plan(
    request: Request, meeting: Meeting, recipe: Recipe, site: Site
) -> tuple[Fleet, Plan, dict[int, Schedule]]:
    """The plan of the job: given, or made by the first process from what all have measured.

    With it come the schedules that only the first process can make, by samples of a step.
    """
    fleet = request.fleet
    if request.plan is not None:
        check_plan(request.plan, fleet, recipe)
        plan = with_inexact(request.plan, recipe)
        sizes = step_sizes(len(recipe.dataset), plan.global_batch)
        return fleet, plan, agreed_schedules(plan, sizes, fleet, request.profile, meeting)
    profile = request.profile
    if profile is None:
        if meeting.rank == 0 and not request.quiet:
            kinds = len({d.kind for d in fleet.devices})
            told = f"measuring the model on {counted(kinds, 'kind')}, at most about {request.profile_s:.0f} s"
            print(told, file=sys.stderr)
        sizes = (request.micro_batch,) if request.micro_batch else micro_batch_grid(recipe.global_batch)
        profile = profile_together(recipe, site, meeting, request, sizes)
    if len(fleet.devices) > 1 and not fleet.links:
        everyone = tuple(d.name for d in fleet.devices)
        meeting.join_group(tuple(range(meeting.world_size)), 0, backend_of(fleet, everyone))
        fleet = measured_link(fleet, site.wire(fleet, everyone, rehearse=False), site.torch_device)
        meeting.leave_group()
    if meeting.rank:
        return fleet, meeting.get("plan", Plan), {}
    assert profile is not None
    plan = choose_plan(request, fleet, recipe, profile)
    write(Path(request.run_dir) / "profile.json", profile)
    write(Path(request.run_dir) / "fleet.json", fleet)
    meeting.put("plan", plan)
    return fleet, plan, {}


def _prepare_for_change(request: Request, fleet: Fleet, steps: Steps) -> None:
    """What may change in mid-run, by measured speeds or by script."""
    holding, leads = steps.layout.holding, steps.ranks.rank == 0
    steps.adapter, why_not = adapter_of(request, fleet, steps.plan, holding.wire, leads=leads)
    steps.decisions += [why_not] if why_not else []
    steps.scripted = scripted(request, steps.site, [part.module for part in holding.parts.values()])


def _train(request: Request, meeting: Meeting, recipe: Recipe, steps: Steps) -> Outcome | None:
    plan, ranks, layout, site = steps.plan, steps.ranks, steps.layout, steps.site
    wire = layout.holding.wire
    evaluate = request.evaluate and recipe.heldout is not None
    stop = samples_to_train(request, len(recipe.dataset), recipe.global_batch)
    leads = ranks.rank == 0
    if request.keep_gradient:
        folder, extra = Path(request.run_dir), layout.tables.dense_gradients
        keep_first_gradient(layout.parameters, steps.optimizer, folder, ranks.rank, extra)
    try:
        with Journal(request, recipe, plan, leads=leads, total_samples=stop) as journal:
            if evaluate:
                journal.heldout_first = evaluate_heldout(steps, wire)
            for record in steps.run(stop):
                journal.add(record)
                journal.tell(steps.decisions)
            if evaluate:
                journal.heldout_last = evaluate_heldout(steps, wire)
    finally:
        steps.close()  # also after an error: a model that is trained again must have no hooks of ours
    _hand_in(meeting, steps, site)
    steps.average_buffers(wire)
    collect(recipe.model, layout.holders, ranks)
    layout.tables.put_back(recipe.model, Path(request.run_dir))
    if not leads:
        return None
    save_parameters(recipe.model, Path(request.run_dir))
    spans = [s for d in ranks.devices for s in meeting.get(f"trace/{d}", Trace).spans]
    lateness = [meeting.get(f"lateness/{d}", Lateness) for d in ranks.devices] if request.rehearse else []
    sums = [meeting.get(f"checksums/{d}", Checksums).by_name for d in ranks.devices]
    return journal.conclude(steps.plan, spans, steps.decisions, lateness, sums)


class Checksums(Value, frozen=True, kw_only=True):
    """A hash of each parameter that a device holds."""

    by_name: dict[str, str]


def _hand_in(meeting: Meeting, steps: Steps, site: Site) -> None:
    """Give the leading process what only this one knows: spans, lateness, the parameters' checksum."""
    here = site.device.name
    meeting.put(f"trace/{here}", Trace(source="measured", spans=steps.executor.spans))
    meeting.put(f"checksums/{here}", Checksums(by_name=checksums(steps.layout.parameters)))
    if site.lateness is not None:
        meeting.put(f"lateness/{here}", site.lateness)
