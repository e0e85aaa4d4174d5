"""What one process of a job does, from meeting the others to the report.

open device → load recipe → measure (each kind once) → plan (first process) ─┐
        ┌────────────────────────────────────────────────────────────────────┘
        └► form a generation → steps → report
               ▲                 │ a device is lost, leaves or joins
               └── roll call ◄───┘
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from evener.core.membership import Electorate, Turn
from evener.core.tell import tell
from evener.errors import EvenerError, PeerLostError, RefusedError
from evener.profiling.memory import give_back
from evener.runtime.checkpoints.manifest import Position
from evener.runtime.replicas import spread_state
from evener.runtime.tables.layer import table_layers
from evener.session.checkpoints.resume import RESUME, Chosen, chosen_for
from evener.session.generation import conclude, train
from evener.session.journal import Journal, Outcome
from evener.session.launched import is_launched
from evener.session.layout.fewer import NOT_ELASTIC, parting_ways
from evener.session.layout.owning import NOT_ELASTIC as PARTS_NOT_ELASTIC
from evener.session.layout.tables import ids_found, in_files, table_names, tables_end, take_out
from evener.session.meeting import FINISHED, FOREVER, HOW_TO_JOIN, OUTCOME, STORE_GONE, Failure, Meeting
from evener.session.members.form import form, room_of
from evener.session.members.joiner import enter, own_profile
from evener.session.members.member import Belongings, Generation, Member
from evener.session.members.standby import Standby
from evener.session.members.turnover import next_turn, tear_down
from evener.session.planning.additive import unseen_in
from evener.session.planning.agreed import agreed_plan, prepared
from evener.session.planning.beside import beside_accelerators
from evener.session.planning.decide import fewer_of, other_batch, samples_to_train
from evener.session.planning.measure import check_unmeasured
from evener.session.planning.pace import too_fast
from evener.session.planning.placing import settled
from evener.session.planning.preflight import look_over
from evener.session.pulse import SILENT_S, Pulse
from evener.session.recipe import Recipe, load_recipe
from evener.session.request import Later, Request, may_hold_parts
from evener.session.site import open_site, site_of

MOST_FAILURES = 4
STAND_BY_S = 0.02
KNOWN_WITHIN_S = 0.5  # a process that has ended is told to the others at once


def guarded_work(request: Request, meeting: Meeting, recipe: Recipe | None = None) -> Outcome | None:
    """`work`, telling the other processes why, should it fail; raises the first failure of the job."""
    with telling(meeting, request.fleet.devices[meeting.rank].name):
        return work(request, meeting, recipe)


@contextmanager
def telling(meeting: Meeting, name: str) -> Iterator[None]:
    """What ends the process of device `name` in here ends the job, and all others are told why."""
    try:
        with _lost_ones(meeting):
            yield
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


@contextmanager
def _lost_ones(meeting: Meeting) -> Iterator[None]:
    """torch's errors of connections that end are PeerLostError where it is known who or what was lost."""
    try:
        yield
    except RuntimeError as e:
        end = time.monotonic() + KNOWN_WITHIN_S
        while meeting.alarm() is None and time.monotonic() < end:
            time.sleep(STAND_BY_S)
        alarm = meeting.alarm() or (None if meeting.answers() else STORE_GONE)
        if alarm is None:
            raise
        raise PeerLostError(alarm, numbers=str(e).partition("\n")[0]) from e


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
    look_over(request, meeting)
    brought = recipe or load_recipe(request.script, request.seed)
    recipe = prepared(brought, request)
    request, threads = beside_accelerators(request, recipe)
    site = site_of(request, meeting.rank)
    recipe, placing = settled(recipe, request, meeting)
    pulse = None
    if survives(request, recipe):
        others = [d.name for d in request.fleet.devices if d.name != site.device.name]
        pulse = _started_pulse(meeting, site.device.name)
        pulse.watch(1, others, lambda reason: meeting.sockets.shut())  # links are measured in a group
        if meeting.rank == 0 and meeting.has(HOW_TO_JOIN):
            tell(meeting.get(HOW_TO_JOIN, str))
    member = Member(request=request, meeting=meeting, recipe=recipe, site=site, pulse=pulse)
    member.decisions += [*other_batch(request, brought.global_batch), *threads, *placing.settled.notes]
    if request.elastic and len(request.fleet.devices) > 1 and table_names(recipe):
        member.decisions.append(tables_end(recipe))
    apart = parting_ways(request, recipe)
    if request.elastic and len(request.fleet.devices) > 1 and apart:
        member.decisions.append(NOT_ELASTIC.format(apart))
    if request.elastic and len(request.fleet.devices) > 1 and may_hold_parts(request):
        member.decisions.append(PARTS_NOT_ELASTIC)
    try:
        if request.resume and meeting.rank == 0:
            meeting.put(RESUME, _taken_up(request, request.resume, recipe))
        fleet, plan, member.given = agreed_plan(request, meeting, recipe, site, placing)
        if request.profile is None and member.given:
            member.decisions += unseen_in(member.given)
        given = request.plan is not None or request.profile is not None
        if given and meeting.rank == 0 and (unseen := check_unmeasured(recipe, site, plan)):
            member.decisions.append(unseen)
        timed = request.rehearse and not request.keep_gradient
        if timed and meeting.rank == 0 and (why := too_fast(plan, member.given)):
            tell(why)
            member.decisions.append(why)
        names = tuple(d.name for d in fleet.devices)
        all_bound = Electorate(devices=names, bound=names)
        turn = Turn(fleet=fleet, plan=plan, members=names, electorates=(all_bound,))
        outcome, last = _live(member, turn, 1)
        if handed_in and not _everyone_has_all(last, recipe):
            _hand_on(member, last)
        return outcome
    finally:
        if pulse:
            pulse.stop()
        take_out(recipe.model)


def _taken_up(request: Request, resume: str, recipe: Recipe) -> Chosen:
    """The checkpoint to go on from: what is wrong with it is told before anything is measured."""
    batch, size = recipe.global_batch, len(recipe.dataset)
    here: Position | None = None
    if not fewer_of(request, recipe):  # else the plan decides the batch of a step
        here = Position(
            step=0,
            samples_seen=0,
            seed=request.seed,
            global_batch=request.plan.global_batch if request.plan else batch,
            dataset_size=size,
            shuffle=recipe.shuffle,
        )
    stop = samples_to_train(request, size, batch)
    return chosen_for(resume, Path(request.run_dir), here, stop=stop)


def join(
    request: Request,
    meeting: Meeting,
    later: Later,
    say: Callable[[str], None] = lambda sentence: None,
    standby: Standby | None = None,
) -> Outcome | None:
    """Take part in a running job as another device; the outcome if it comes to lead.

    The recipe is loaded and measured while the others train; `say` is told when it has joined. Raises
    RefusedError with the job's reason; what fails before that does not touch the job.
    """
    device = later.device
    site = open_site(device, rehearse=request.rehearse, fleet=request.fleet)
    site = site.with_real_links() if request.real_links else site
    recipe = prepared(load_recipe(request.script, request.seed), request)
    recipe, _ = settled(recipe, request, meeting, decides=False)
    if in_files(recipe):
        raise RefusedError(
            f"a job with tables in files takes in no device: {', '.join(table_names(recipe))}",
            remedy="start it again with all devices",
        )
    if layers := table_layers(recipe.model):
        ids_found(recipe, layers)  # rows could not be exchanged else: said before it touches the job
    pulse = _started_pulse(meeting, device.name)
    member = Member(
        request=request,
        meeting=meeting,
        recipe=recipe,
        site=site,
        pulse=pulse,
        has_begun=True,
        standby=standby,
    )
    try:
        try:
            own_profile(member)
            number, turn = enter(member, device, later.from_step, later.links)
        except RuntimeError as e:  # torch's, of the store
            raise RefusedError(
                "the job ended before this device could join", numbers=str(e).partition("\n")[0]
            ) from e
        part = "with a part" if device.name in turn.plan.devices else "without a part yet"
        say(f"{device.name} is in the job from step {turn.step + 1} on, {part}")
        with telling(meeting, device.name):
            return _live(member, turn, number)[0]
    finally:
        pulse.stop()


def _started_pulse(meeting: Meeting, name: str) -> Pulse:
    """The heartbeat of device `name`, whose alarm ends what is awaited from the store."""
    pulse = Pulse(meeting.connect(), name, cut_off=meeting.cut_off)
    pulse.start()
    meeting.alarm = lambda: pulse.alarm
    return pulse


def survives(request: Request, recipe: Recipe) -> bool:
    """Whether devices may leave, join and be lost: where it is wished, and there is a store to meet in.

    Not where tables are in files, which are a device's own. Not where hosts may take steps by themselves:
    nobody else has the weights of a lost one.
    """
    if parting_ways(request, recipe):
        return False
    if may_hold_parts(request):
        return False
    return request.elastic and is_launched() and not in_files(recipe)


def _live(member: Member, turn: Turn, number: int) -> tuple[Outcome | None, Generation]:
    """Generation after generation, from `number` on, until the run is at its end."""
    failures, earlier = 0, False
    with _loaded_apart(), Journal(member.request, member.recipe) as journal:
        while True:
            generation = Generation(number=number, room=member.meeting.within(room_of(number)), turn=turn)
            if earlier:
                # The one before holds itself in circles, with room for all gradients: this one needs that.
                # Not before the first: a pulse that is late by then bears with silence for seconds.
                give_back(member.site.torch_device)
            earlier = True
            try:
                form(member, generation)
                if generation.steps is None:
                    _stand_by(member, generation)
                elif train(member, generation, journal):
                    outcome = conclude(member, generation, journal)
                    _finish(member, generation, outcome)
                    return outcome, generation
                why = "a change was prepared"
            except _Finished:
                return None, generation
            except (PeerLostError, RuntimeError) as e:
                if not _can_go_on(member, e):
                    raise
                why = str(e).partition("\n")[0]
            finally:
                tear_down(generation)
            failures = 0 if generation.has_moved else failures + 1
            if failures == MOST_FAILURES:
                raise PeerLostError(
                    f"{failures} generations in a row ended before their first step", numbers=why
                )
            try:
                if _is_finished(member):  # noticed late
                    return None, generation
                number, turn = _next(member, generation, why)
            except _Finished:
                return None, generation
            for record in member.records:
                journal.add(record)
            member.records.clear()


@contextmanager
def _loaded_apart() -> Iterator[None]:
    """What was there before the first generation, torch above all, is not looked through for circles.

    That took 0.3 s of a job that waits for its next step, and seconds on a busy machine.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _next(member: Member, generation: Generation, why: str) -> tuple[int, Turn]:
    """The next generation's number and turn. A device that was taken for lost wishes to join again."""
    found = next_turn(member, generation, why)
    if found is not None:
        return found
    assert member.pulse is not None
    member.pulse.watch(0, (), lambda reason: None)
    member.belongings, member.electorates = Belongings(), ()
    sentence = f"{member.here} was taken for lost by the others ({why}) and wishes to join again"
    tell(sentence)
    member.decisions.append(sentence)
    try:
        return enter(member, member.site.device)
    except RefusedError as e:
        if member.meeting.has(FINISHED):
            raise _Finished from e
        raise


def _can_go_on(member: Member, error: BaseException) -> bool:
    """Whether `error` says that a device is lost, and the others have what is needed to go on."""
    if member.pulse is None or not member.has_begun:
        return False
    return isinstance(error, PeerLostError) or member.pulse.wait_for_alarm(SILENT_S + 0.5)


def _is_finished(member: Member) -> bool:
    """Whether the run has ended, so far as the store can be asked."""
    return member.meeting.answers() and member.meeting.has(FINISHED)


class _Finished(Exception):
    """The others have brought the run to its end, or it goes on without this device."""


def _stand_by(member: Member, generation: Generation) -> None:
    """A device without a part waits until the run ends, or until there is one for it."""
    if member.pulse is None or member.here in generation.turn.leaves:
        raise _Finished
    while not member.meeting.has(FINISHED):
        if member.pulse.alarm:
            return
        time.sleep(STAND_BY_S)
    raise _Finished


def _finish(member: Member, generation: Generation, outcome: Outcome | None) -> None:
    """Nobody leaves before the leading device has everything: a device that ends is one that is lost."""
    assert generation.steps is not None
    if generation.steps.ranks.rank == 0:
        if outcome is not None:
            member.meeting.put(OUTCOME, outcome)
        member.meeting.put(FINISHED, True)
    elif member.pulse is not None:
        member.meeting.get(FINISHED, bool, timeout=FOREVER)


def _everyone_has_all(generation: Generation, recipe: Recipe) -> bool:
    """Whether each process of the job ends with the whole trained model without being given it."""
    plan, used = generation.turn.plan, generation.used
    alone = len(used) == len(generation.turn.stays) == 1
    shared_tables = len(used) > 1 and bool(table_names(recipe))
    return alone or (len(used) == len(generation.turn.stays) and plan.is_data_parallel and not shared_tables)


def _hand_on(member: Member, generation: Generation) -> None:
    """Give the trained model to every process of the job, also to those that the plan left out."""
    leader = generation.used[0]
    if member.here == leader:
        member.meeting.put("trained", True)
    member.meeting.get("trained", bool, timeout=FOREVER)
    names = list(generation.turn.stays)
    names.sort(key=lambda d: d != leader)  # the leader first
    room = member.meeting.within("handing on")
    room.join_group(names.index(member.here), len(names), "gloo")
    spread_state(member.recipe.model)
    room.leave_group()
