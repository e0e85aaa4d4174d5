"""One generation at work: steps, held-out loss, and at the end everything to the leading device."""

from pathlib import Path

import msgspec

from evener.core.figures import Figure, Value
from evener.core.files import append
from evener.core.records import TableRecord
from evener.core.tell import tell
from evener.core.trace import Trace
from evener.core.words import counted, some
from evener.errors import FileError
from evener.rehearsal.verdict import Lateness
from evener.runtime.hardware import peak_bytes
from evener.runtime.replicas import checksums, collect
from evener.session.checkpoints.checkpointing import MAY_ASK, Checkpointing
from evener.session.checkpoints.tensors import keep_first_gradient, save_parameters
from evener.session.journal import Journal, Outcome
from evener.session.loop.adapting import adapter_of
from evener.session.loop.heldout import evaluate_heldout
from evener.session.loop.profiled import write_profiled
from evener.session.loop.relieving import priced
from evener.session.loop.scripted import begin_script, scripted
from evener.session.loop.stealing import Stealing
from evener.session.loop.steps import Steps
from evener.session.meeting import Meeting
from evener.session.members.changes import changes_of
from evener.session.members.copying import Copying
from evener.session.members.member import Generation, Member
from evener.session.members.moving import mover_of
from evener.session.planning.decide import samples_to_train


class Checksums(Value, frozen=True, kw_only=True):
    """A hash of each parameter that a device holds."""

    by_name: dict[str, str]


class Lookups(Value, frozen=True, kw_only=True):
    """What a device looked up in all steps, by table."""

    by_table: dict[str, TableRecord] = {}


MOST_NAMED = 8
NOT_SAVED = (
    "this run saves no checkpoint: without --checkpoint-every (checkpoint_every=) a later --resume "
    "begins where this one did"
)


class Said(Value, frozen=True, kw_only=True):
    """What a device alone has to say of the run."""

    lines: tuple[str, ...]


def train(member: Member, generation: Generation, journal: Journal) -> bool:
    """Take the steps of this generation; False when a change is ahead, True when the run is at its end."""
    request, recipe, steps = member.request, member.recipe, generation.steps
    assert steps is not None
    _prepare_for_change(member, generation)
    saving = _saving(member, generation)
    changes = changes_of(member, generation)
    mover = mover_of(member, generation, changes)
    wire, layout = steps.layout.holding.wire, steps.layout
    evaluate = request.evaluate and recipe.heldout is not None
    if request.keep_gradient and steps.number == 0:
        folder, owned = Path(request.run_dir), layout.holding.owned
        extra = owned.whole_gradients if owned else layout.tables.dense_gradients
        keep_first_gradient(layout.parameters, steps.optimizer, folder, steps.ranks.rank, extra)
    journal.open(steps.plan, leads=steps.ranks.rank == 0)
    try:
        journal.tell(steps.decisions)  # where it was taken up, before its first step
        if evaluate and steps.number == 0:
            journal.heldout_first = evaluate_heldout(steps, wire)
        stop = samples_to_train(request, len(recipe.dataset), recipe.global_batch)
        for record in steps.run(stop):
            journal.add(steps.with_lookups(record))
            journal.tell(steps.decisions)
        if steps.called:
            return False
        fewer, more = steps.plan.fewer, steps.samples_seen - stop
        if fewer and fewer.how == "accumulate" and more:
            steps.decisions.append(
                f"the last step of {fewer} took {counted(more, 'sample')} more than asked for"
            )
        if saving:
            saving.finish()
            if request.quiet and saving.failed:  # who relies on them has fewer than asked for
                tell(saving.failed)
    finally:
        if mover:
            mover.close()
        if changes:
            changes.stop()
        if saving:
            saving.close()
    if evaluate:
        journal.heldout_last = evaluate_heldout(steps, wire)
    return True


def conclude(member: Member, generation: Generation, journal: Journal) -> Outcome | None:
    """Bring the trained model to the leading device, which writes it and reports; None on the others.

    Hooks of ours leave the model: it may be trained again. FileError where the model cannot be written, once
    everything else is.
    """
    steps, room, recipe = generation.steps, generation.room, member.recipe
    assert steps is not None
    layout, ranks = steps.layout, steps.ranks
    steps.decisions += steps.stealing.summary() if steps.stealing else []
    faults = member.request.faults.faults
    steps.decisions += [f"{fault}: not reached" for fault in faults if fault.at_step >= steps.number]
    tell_passage(member, generation)
    room.put(f"peak/{steps.ranks.here}", peak_bytes(steps.site.torch_device))
    if layout.holding.owned:
        layout.holding.owned.parameters.whole()
    _hand_in(room, steps)
    steps.average_buffers(layout.holding.wire)
    collect(recipe.model, layout.holders, ranks)
    layout.tables.put_back(recipe.model, Path(member.request.run_dir))
    unsaved: FileError | None = None
    if ranks.rank == 0:
        try:
            save_parameters(recipe.model, Path(member.request.run_dir))
        except FileError as e:
            unsaved = e
    # After the weights are written: no comparison may cost what was trained.
    room.put(f"checksums/{ranks.here}", Checksums(by_name=checksums(layout.parameters)))
    if ranks.rank:
        return None
    spans = [s for d in ranks.devices for s in room.get(f"trace/{d}", Trace).spans]
    rehearsed = member.request.rehearse
    lateness = [room.get(f"lateness/{d}", Lateness) for d in ranks.devices] if rehearsed else []
    sums = [room.get(f"checksums/{d}", Checksums).by_name for d in ranks.devices]
    if member.request.profile_step is not None:
        folder = Path(member.request.run_dir)
        try:
            steps.decisions += [write_profiled(room, ranks.devices, member.request.profile_step, folder)]
        except FileError as e:
            steps.decisions += [e.what]
    steps.decisions += _said({d: room.get(f"said/{d}", Said).lines for d in ranks.devices})
    journal.since = max(steps.since, generation.turn.step)
    journal.peak_bytes = {d: room.get(f"peak/{d}", Figure) for d in ranks.devices}
    journal.lookups = {d: room.get(f"lookups/{d}", Lookups).by_table for d in ranks.devices}
    outcome = journal.conclude(steps.plan, spans, steps.decisions, lateness, sums)
    if unsaved:
        raise unsaved
    return outcome


def tell_passage(member: Member, generation: Generation) -> None:
    """Once the first step of a later generation is committed: how long the job was without one."""
    steps = generation.steps
    if steps is None or not generation.has_moved:
        return
    member.stopwatch.mark("first step")
    passage = member.stopwatch.finish(generation.number, generation.turn.step)
    if passage is None:
        return
    steps.decisions.append(str(passage))
    if steps.ranks.rank == 0:
        try:
            append(Path(member.request.run_dir) / "generations.jsonl", msgspec.json.encode(passage) + b"\n")
        except FileError as e:
            steps.decisions.append(e.what)


def _prepare_for_change(member: Member, generation: Generation) -> None:
    """What may change in mid-run, by measured speeds or by script; and copies against losses."""
    request, steps, fleet = member.request, generation.steps, generation.turn.fleet
    assert steps is not None
    holding, leads = steps.layout.holding, steps.ranks.rank == 0
    profile = member.profile if leads else None
    steps.adapter, why_not = adapter_of(request, fleet, steps.plan, holding.wire, profile)
    steps.decisions += [why_not] if why_not and generation.number == 1 else []
    steps.decisions += steps.layout.notes if holding.owned else ()
    if steps.layout.apart is None and not holding.owned:  # else only a part of the devices redoes a step
        steps.relieve = priced(holding.wire, fleet, profile, leads=leads)
    if member.faults is None:
        member.faults = begin_script(request, steps.site)
    steps.scripted = scripted(
        member.faults, steps.site, [part.module for part in holding.parts.values()], member.pulse
    )
    if steps.plan.steal and len(steps.plan.devices) > 1:
        store = generation.room.within("stealing").store
        steps.stealing = Stealing(store, steps.samples, member.here, steps.site.driver.now)
    copying = Copying(member, generation)

    def at_boundary(number: int) -> None:
        tell_passage(member, generation)
        copying.at_boundary(number)

    steps.at_boundary = at_boundary


def _saving(member: Member, generation: Generation) -> Checkpointing | None:
    """The checkpoints that were asked for, beside whatever else is done between two steps."""
    request, steps = member.request, generation.steps
    assert steps is not None
    if request.checkpoint is None:
        if request.resume and generation.number == 1:
            steps.decisions.append(NOT_SAVED)
        return None
    job = member.meeting if steps.meetings is None and member.meeting.has(MAY_ASK) else None
    saving = Checkpointing(
        request.checkpoint, request.run_dir, generation.room, steps, job=job, failures=member.unsaved
    )
    others = steps.at_boundary

    def at_boundary(number: int) -> None:
        others(number)
        saving.at_boundary(number)

    steps.at_boundary = at_boundary
    return saving


def _hand_in(room: Meeting, steps: Steps) -> None:
    """Give the leading process what only this one knows: spans, lateness, what it has to say."""
    here, site, tidied = steps.ranks.here, steps.site, steps.executor.tidied
    room.put(f"said/{here}", Said(lines=(*site.notes, *steps.said, *([tidied] if tidied else []))))
    room.put(f"trace/{here}", Trace(source="measured", spans=steps.executor.spans))
    room.put(f"lookups/{here}", Lookups(by_table=steps.layout.tables.lookups))
    if steps.profiler and steps.profiler.found:
        room.put(f"profiled/{here}", steps.profiler.found)
    if site.lateness is not None:
        room.put(f"lateness/{here}", site.lateness)


def _said(lines: dict[str, tuple[str, ...]]) -> list[str]:
    """What devices had to say, once for all that say the same. Example: a and b with "x": ["a, b: x"]."""
    by_line: dict[str, list[str]] = {}
    for device, said in lines.items():
        for line in said:
            by_line.setdefault(line, []).append(device)
    return [f"{some(devices, MOST_NAMED)}: {line}" for line, devices in by_line.items()]
