"""Before the first step: the recipe as this run wants it, and the plan that all devices agree on."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from evener.core.files import write
from evener.core.fleet import Fleet
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.core.seams import Wire
from evener.core.words import counted
from evener.errors import ModelError, UsageError
from evener.policy.trials import Trials, trials_of
from evener.runtime.batchnorm import replace_batchnorm
from evener.runtime.wires.grouped import GroupedWire
from evener.session.checkpoints.tensors import load_weights
from evener.session.layout.fewer import check_fewer
from evener.session.layout.owning import check_owned, with_owners
from evener.session.layout.tables import place_tables, table_names
from evener.session.loop.stealing import check_stealing
from evener.session.meeting import Meeting
from evener.session.planning.decide import check_micro_batch, check_plan, choose_plan, steals
from evener.session.planning.inexact import with_inexact
from evener.session.planning.measure import measured_links, micro_batch_grid, profile_together
from evener.session.planning.pace import without_rate
from evener.session.planning.place_words import make_folders
from evener.session.planning.placing import Placing, plan_with_tables, with_places
from evener.session.planning.trials import with_tried_sums
from evener.session.recipe import Recipe, in_dtype, with_keys, without_dropout
from evener.session.request import Request
from evener.session.site import Site, backend_of


def prepared(recipe: Recipe, request: Request) -> Recipe:
    """The recipe with what the request changes: batch, weights, dtype, dropout; tables where they belong."""
    if request.global_batch:
        recipe = dataclasses.replace(recipe, global_batch=request.global_batch)
    check_micro_batch(request, recipe)
    if request.weights:
        load_weights(recipe.model, request.weights)
    if request.dtype:
        recipe = in_dtype(recipe, getattr(torch, request.dtype))
    if request.rehearse and request.plan is None and (lacking := without_rate(request.fleet, recipe)):
        raise UsageError(
            "devices that are rehearsed cannot be paced in the dtype of the model",
            numbers=lacking,
            remedy="its rate in the flops of these devices, or a dtype that they have",
        )
    recipe = with_keys(recipe, request.seed)
    if recipe.batch_norm == "wave":
        replace_batchnorm(recipe.model)
    if not request.dropout:
        recipe = without_dropout(recipe)
    recipe.model.train()
    if not request.predict and not any(p.requires_grad for p in recipe.model.parameters()):
        raise ModelError("no parameter of the model requires a gradient", remedy="unfreeze what is to train")
    recipe = with_places(recipe, request)
    if not request.predict:
        make_folders(recipe.places)
    place_tables(recipe)
    return recipe


def agreed_plan(
    request: Request, meeting: Meeting, recipe: Recipe, site: Site, placing: Placing
) -> tuple[Fleet, Plan, Profile | None]:
    """Fleet and plan of the job: given, or made by the first process from what all have measured.

    `placing` says where tables lie; which rows of them a device has, the plan says.
    The profile is known to the first process, and in the store for whoever plans after it.
    """
    fleet, profile = request.fleet, request.profile
    if request.plan is not None:
        check_plan(request.plan, fleet, recipe)
        plan = with_owners(request.plan, request, fleet, recipe.model)
        if plan.steal or steals(request, recipe):
            check_stealing(plan, recipe.model, table_names(recipe))
            plan = msgspec.structs.replace(plan, steal=True)
        check_fewer(plan, recipe)
        check_owned(plan, recipe, table_names(recipe))
        if meeting.rank == 0:
            _keep(request, fleet, profile)
            meeting.put("plan", placing.on(with_inexact(plan, recipe, profile), fleet, recipe))
        return fleet, meeting.get("plan", Plan), profile
    if profile is None:
        if meeting.rank == 0 and not request.quiet:
            kinds = len({d.kind for d in fleet.devices})
            told = f"measuring the model on {counted(kinds, 'kind')}, at most about {request.profile_s:.0f} s"
            print(told, file=sys.stderr)
        sizes = (request.micro_batch,) if request.micro_batch else micro_batch_grid(recipe.global_batch)
        profile = profile_together(recipe, site, meeting, request, sizes)
    if len(fleet.devices) > 1 and not fleet.links:
        fleet = _with_links(request, meeting, recipe, site)
    if meeting.rank:
        return fleet, meeting.get("plan", Plan), None
    assert profile is not None

    def choose(asked: Request, left: Fleet) -> Plan:
        return with_owners(choose_plan(asked, left, recipe, profile), asked, fleet, recipe.model)

    plan = plan_with_tables(choose, request, fleet, recipe, placing)
    check_fewer(plan, recipe)
    check_owned(plan, recipe, table_names(recipe))
    _keep(request, fleet, profile)
    meeting.put("profile", profile)
    meeting.put("plan", plan)
    return fleet, plan, profile


def _with_links(request: Request, meeting: Meeting, recipe: Recipe, site: Site) -> Fleet:
    """The fleet with the links between its devices, and sums tried on them; measured by all together."""
    fleet, here = request.fleet, site.device.name
    everyone = tuple(d.name for d in fleet.devices)
    room = meeting.within("measuring links")
    room.join_group(meeting.rank, meeting.world_size, backend_of(fleet, everyone))

    def new_group(devices: Sequence[str], backend: str) -> dist.ProcessGroup:
        return room.new_group([everyone.index(d) for d in devices], backend)

    def wire_among(names: tuple[str, ...]) -> Wire:
        group = new_group(names, backend_of(fleet, names)) if names != everyone else None
        return site.wire(fleet, names, rehearse=False, group=group)

    def around(grouped: GroupedWire) -> Wire:
        return site.around(grouped, fleet, everyone, rehearse=False)

    wire = wire_among(everyone)
    fleet = measured_links(fleet, here, wire, wire_among, site.torch_device)
    trials = _agreed_trials(request, room, fleet, recipe) if request.sums != "ring" else None
    if trials and trials.ways:
        fleet = with_tried_sums(fleet, trials, here, wire, new_group, around, site.torch_device)
    room.leave_group()
    return fleet


def _agreed_trials(request: Request, room: Meeting, fleet: Fleet, recipe: Recipe) -> Trials:
    """The ways of summing that all devices try together; the first one says which, and tells it."""
    if room.rank == 0:
        num_bytes = sum(p.numel() * 4 for p in recipe.model.parameters() if p.requires_grad)
        names = tuple(d.name for d in fleet.devices)
        compress = request.compress or tuple(recipe.compress)
        found = trials_of(fleet, names, compress, num_bytes)
        if not request.quiet and len({d.host for d in fleet.devices}) > 1:
            print(f"summing gradients: {found.why}", file=sys.stderr)
        room.put("trials", found)
    return room.get("trials", Trials)


def _keep(request: Request, fleet: Fleet, profile: Profile | None) -> None:
    """Leave in the run's folder what its report is made from."""
    write(Path(request.run_dir) / "fleet.json", fleet)
    if profile is not None:
        write(Path(request.run_dir) / "profile.json", profile)
