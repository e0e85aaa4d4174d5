"""A generation is formed: group, layout, and state for whoever is to hold what he does not have.

join the group ──► lay out the plan ──► state moves ──► all are ready
"""

from pathlib import Path

import torch

from evener.core.figures import Value
from evener.core.tell import tell
from evener.policy.settle import moves
from evener.runtime.executor import let_go
from evener.runtime.ranks import PATIENCE, Ranks
from evener.runtime.replicas import spread_state
from evener.session.checkpoints.resume import RESUME, Chosen, take_up
from evener.session.checkpoints.state import held_tensors, holders_of
from evener.session.checkpoints.tensors import saved_tensors
from evener.session.layout.alike import check_alike
from evener.session.layout.lay_out import lay_out
from evener.session.layout.seat import Seat
from evener.session.layout.sums import link_watch
from evener.session.layout.tables import tables_of
from evener.session.loop.keeping import Keeping
from evener.session.loop.profiled import StepProfiler
from evener.session.loop.steps import Steps
from evener.session.loop.timetable import agreed_schedules, step_sizes
from evener.session.loop.unfinished import unfinished
from evener.session.meeting import BEGUN, FOREVER, REGROUP_TIMEOUT
from evener.session.members.handover import hand_over
from evener.session.members.member import Generation, Member
from evener.session.members.rows import move_rows
from evener.session.pulse import SILENT_S
from evener.session.site import backend_of


class Wanted(Value, frozen=True, kw_only=True):
    """Who is to hold each name under the new plan."""

    holders: dict[str, tuple[str, ...]]


def room_of(generation: int) -> str:
    """The name of the part of the store that is a generation's own."""
    return f"generation/{generation}"


def form(member: Member, generation: Generation) -> None:
    """Form `generation` as its turn says; called by all its members together.

    Raises PeerLostError when one of them is lost meanwhile: what this device had is then as good as before.
    """
    request, here = member.request, member.here
    turn, used, number = generation.turn, generation.used, generation.number
    member.electorates = turn.electorates
    if number > 1:
        generation.room.put(f"seen/{here}", True)
    if member.pulse:
        member.pulse.watch(number, [d for d in turn.members if d != here], generation.wake)
    if here in used:
        _take_seat(member, generation)
    if number > 1:
        _settle_in(member, generation)
    if generation.steps is not None:
        if request.resume and number == 1:
            take_up(member.meeting.get(RESUME, Chosen), Path(request.run_dir), generation.steps)
        _become_live(member, generation)
        if number > 1 and generation.steps.ranks.rank == 0:
            # Formed is what all members know of: who knows the one before alone is a minority of that.
            for device in turn.members:
                generation.room.get(f"seen/{device}", bool, FOREVER)
        ready = torch.zeros(1)
        generation.steps.layout.holding.wire.all_reduce(ready, f"generation {number}").wait()
        if generation.steps.ranks.rank == 0:
            member.meeting.put(BEGUN, True)
        member.electorates = turn.electorates[-1:]
    member.has_begun = True
    member.stopwatch.mark("forming")
    if member.pulse:
        member.pulse.patience_s = SILENT_S
        member.pulse.ignore(turn.leaves)
    if member.standby:
        member.standby.remember(member.meeting)


def _take_seat(member: Member, generation: Generation) -> None:
    """Join the group of the devices with a part in the plan, lay it out, and make the steps."""
    request, site, here = member.request, member.site, member.here
    turn, room, used, number = generation.turn, generation.room, generation.used, generation.number
    ranks = Ranks(used, here)
    room.rank, room.world_size = ranks.rank, ranks.world_size
    if len(used) > 1:
        patience = PATIENCE if number == 1 else REGROUP_TIMEOUT
        room.join_group(ranks.rank, len(used), backend_of(turn.fleet, used), patience)
        if number == 1:
            check_alike(member.recipe.model, ranks, room)
            spread_state(member.recipe.model)
    sizes = step_sizes(len(member.recipe.dataset), turn.plan.global_batch)
    profile = member.profile if turn.plan.schedule == "unequal" else None
    made = agreed_schedules(turn.plan, sizes, turn.fleet, profile, room)
    seat = Seat(
        recipe=member.recipe,
        plan=turn.plan,
        ranks=ranks,
        site=site,
        fleet=turn.fleet,
        meeting=room,
        rehearse=request.rehearse,
        seed=request.seed,
        goes_on=number > 1,
        folder=request.run_dir,
    )
    layout = lay_out(seat)
    try:
        steps = Steps(seat, layout, made)
    except BaseException:  # a device was lost: what was hung on the model must not meet the next generation
        let_go(layout.holding)
        raise
    steps.decisions = member.decisions
    if ranks.rank == 0 and layout.holding.grouped and not request.rehearse:
        compress = request.compress or tuple(member.recipe.compress)
        steps.link_watch = link_watch(turn.fleet, layout.holding.grouped, layout.parameters, compress)
    for note in dict.fromkeys(wire.note for wire in layout.holding.grouped if wire.note):
        tell(note)
        member.decisions.append(note)
    if request.profile_step is not None:
        steps.profiler = StepProfiler(request.profile_step, here, site.torch_device)
    steps.number, steps.samples_seen = turn.step, turn.samples_seen
    pulse = member.pulse
    if pulse and len(used) > 1:
        steps.keeping = Keeping(layout, turn.plan, site, turn.fleet, lambda: pulse.alarm)
    own = member.belongings
    steps.unfinished, own.kept = unfinished(turn.rest, own.kept, here, layout), None
    if steps.loss_scale and turn.loss_scale:
        steps.loss_scale.restore(turn.loss_scale)
    generation.steps, generation.held = steps, held_tensors(steps)
    generation.open(layout.holding.channel)
    if ranks.rank == 0:
        room.put("wanted", Wanted(holders=holders_of(steps)))


def _settle_in(member: Member, generation: Generation) -> None:
    """What this device is to hold comes from where it is: here, in copies, on another device."""
    turn, own, here = generation.turn, member.belongings, member.here
    steps, held = generation.steps, generation.held
    wanted = generation.room.get("wanted", Wanted).holders
    by_device = {d: [n for n, devices in wanted.items() if d in devices] for d in generation.used}
    sizes = {name: t.nbytes for name, t in saved_tensors(member.recipe.model).items()}
    route = moves(turn.holders, by_device, sizes)
    mine = turn.holders
    # What became old, or is of a step that was given up, must not count as held in the next roll call.
    own.live = {n: x for n, x in own.live.items() if here in mine.get(n, ()) and not turn.rewind}
    own.copies.forget_after(turn.step)
    if turn.rewind:
        own.step, own.samples_seen = turn.step, turn.samples_seen
    states, tables = {}, tables_of(member.recipe.model)
    if turn.rewind and steps is not None:
        states = {n: own.copies.state_of(turn.step, n) for n in held if here in mine.get(n, ())}
    if route or tables:
        channel = member.site.channel(
            turn.everyone,
            Ranks(turn.members, here),
            generation.room.within("handover").store,
            rehearse=member.request.rehearse,
        )
        generation.open(channel)
        state_of = (lambda name: own.copies.state_of(turn.step, name)) if turn.rewind else own.state_of
        try:
            states |= hand_over(route, here, state_of, channel, generation.room, "handover")
            move_rows(tables, turn, generation.used, here, channel, generation.room)
            if tables and member.pulse:
                member.pulse.ignore(turn.leaves)
        finally:
            channel.close()
    if steps is not None:
        own.take_over(held, steps.optimizer)
        own.fill(states, held, steps.optimizer)


def _become_live(member: Member, generation: Generation) -> None:
    own, steps = member.belongings, generation.steps
    assert steps is not None
    own.live |= {name: (tensor, steps.optimizer) for name, tensor in generation.held.items()}
    own.step, own.samples_seen = steps.number, steps.samples_seen
