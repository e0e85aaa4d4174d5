"""From one generation to the next: tear down, roll call, settle the step in flight, and a new plan."""

from collections.abc import Sequence

from msgspec.structs import replace

from evener.core.figures import Value
from evener.core.fleet import Fleet
from evener.core.membership import Electorate, HeldRows, Standing, Turn
from evener.core.order import global_batch_at
from evener.core.plan import Plan
from evener.errors import PeerLostError, StateLostError
from evener.policy.rest import rest_of
from evener.policy.settle import Settlement, settle
from evener.policy.table_rows import rows_given, rows_kept
from evener.session.layout.tables import residence_of, tables_of
from evener.session.members.form import room_of
from evener.session.members.member import Generation, Member
from evener.session.members.plans import next_plan
from evener.session.members.resettle import NUMBERS, resettle
from evener.session.members.roll import Members, begin, call_roll
from evener.session.planning.placing import with_rows

MOST_ROLLS = 8


class Planned(Value, frozen=True, kw_only=True):
    """A change that was prepared while the devices trained: who is there, and the plan for them."""

    fleet: Fleet
    plan: Plan
    members: tuple[str, ...]
    leaves: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


def tear_down(generation: Generation) -> None:
    """Let go of everything that others may still be waiting for; the step in flight stays."""
    generation.wake("this generation of devices has ended")  # work kept alive would keep sockets open
    if generation.steps is not None:
        generation.steps.close()
    generation.room.leave_group()


def next_turn(member: Member, before: Generation, why: str) -> tuple[int, Turn] | None:
    """Agree with the others on how the job goes on after `before`, which ended because of `why`.

    (number of the next generation, its turn); None where the others went on without this device: they took it
    for lost. Should a device be lost meanwhile, the roll is called again, for the generation after.
    """
    member.stopwatch.start()
    number, expected = before.number, _expected(before)
    standing, rolls = before.standing(member), 0
    while True:
        number, rolls = number + 1, rolls + 1
        room = member.meeting.within(room_of(number))
        try:
            turn = _called(member, before, number, expected, standing, why)
        except (RuntimeError, PeerLostError) as e:  # torch's, of the store
            why = str(e).partition("\n")[0]
            if rolls == MOST_ROLLS or (isinstance(e, RuntimeError) and member.meeting.answers()):
                raise
            if isinstance(e, RuntimeError) or not member.meeting.answers():
                why = resettle(member, before, why)
                number = before.number // NUMBERS * NUMBERS + NUMBERS - 1
                expected = tuple(d for d in _expected(before) if d in before.turn.standbys)
            elif room.has("members"):
                expected = room.get("members", Members).devices
            continue
        if turn is None:
            return None
        _settle(member, before, standing, turn)
        member.stopwatch.mark("plan")
        member.decisions.append(f"generation {number}, before step {turn.step}: {'; '.join(turn.reasons)}")
        return number, turn


def _expected(before: Generation) -> tuple[str, ...]:
    """Who may be on the roll: those that leave too, unless a step proves that they have handed over."""
    return before.turn.stays if before.has_moved else before.turn.members


def _called(
    member: Member,
    before: Generation,
    number: int,
    expected: tuple[str, ...],
    standing: Standing,
    why: str,
) -> Turn | None:
    """One roll call and what the first of the roll says; None where this device is not on the roll."""
    room, pulse = member.meeting.within(room_of(number)), member.pulse
    assert pulse is not None
    begin(member.meeting, number, member.here)
    planned = room.get("planned", Planned) if room.has("planned") else None
    if planned is not None:
        expected = (*expected, *(m for m in planned.members if m not in expected))
    # Nobody needs waking: from here on this thread waits for keys of the store alone, and looks up.
    pulse.watch(number, [d for d in expected if d != member.here], lambda reason: None)
    standing = replace(standing, serves=member.serves, electorates=member.electorates)
    standings = call_roll(room, pulse, expected, standing, number)
    if standings is None:
        return None
    member.stopwatch.mark("roll call")
    lost = pulse.lost
    pulse.watch(number, [s.device for s in standings if s.device != member.here], lambda reason: None)
    if standings[0].device == member.here:
        room.put("turn", _turn(member, before, standings, planned, lost, why))
    return room.get("turn", Turn)


def _turn(
    member: Member,
    before: Generation,
    standings: Sequence[Standing],
    planned: Planned | None,
    lost: dict[str, str],
    why: str,
) -> Turn:
    """How the job goes on, decided by the first of the roll for all."""
    settled = settle(standings, member.names)
    members = tuple(s.device for s in standings)
    if not any(s.holds or s.snapshots for s in standings):
        raise StateLostError("no device that is left has any state", remedy="start again: --resume")
    old, plan = before.turn, before.steps.plan if before.steps else before.turn.plan
    begun_under = plan
    gone = [d for d in old.stays if d not in members]
    leaves: tuple[str, ...] = ()
    there = old.everyone.only(tuple(d.name for d in old.everyone.devices if d.name in members))
    reasons = [f"{d} is lost ({lost.get(d, 'ended')})" for d in gone]
    if planned is not None and set(planned.members) == set(members):
        fleet, plan, leaves = planned.fleet, planned.plan, planned.leaves
        reasons += planned.reasons
    else:
        # Who was about to leave, and no step was taken since, is still there.
        fleet = there
        if gone:
            plan, sentence = next_plan(member.request, member.recipe, member.profile, fleet, plan, gone)
            reasons.append(sentence)
        else:
            reasons.append(f"nobody is lost, the same devices meet again ({why})")
    if gone or settled.rewind or settled.ballot:
        reasons.append(settled.reason)
    batch = global_batch_at(settled.samples_seen, len(member.recipe.dataset), begun_under.global_batch)
    rows, plan = _rows(member, standings, settled, fleet, begun_under, plan)
    rest, told = None, ""
    if not settled.rewind:
        rest, told = rest_of(standings, settled.step, batch.samples, begun_under, plan)
    reasons += [told] if told else []
    serves = {s.device: s.serves for s in standings if s.device not in leaves}
    own = Electorate(
        devices=tuple(serves), store=member.meeting.at, bound=tuple(d for d, at in serves.items() if not at)
    )
    return Turn(
        fleet=fleet,
        plan=plan,
        members=members,
        step=settled.step,
        samples_seen=settled.samples_seen,
        holders=settled.holders,
        loss_scale=settled.loss_scale,
        leaves=leaves,
        handing_over=there.joined_by(fleet) if leaves else None,  # some may join as others leave
        ballot=settled.ballot,
        rewind=settled.rewind,
        rest=rest,
        rows=rows,
        reasons=tuple(reasons),
        standbys={d: at for d, at in serves.items() if at},
        electorates=(*dict.fromkeys(e for s in standings for e in s.electorates), own),
    )


def _rows(
    member: Member,
    standings: Sequence[Standing],
    settled: Settlement,
    fleet: Fleet,
    begun_under: Plan,
    plan: Plan,
) -> tuple[dict[str, tuple[HeldRows, ...]], Plan]:
    """Who gives which rows of placed tables, and the plan with who is to have them."""
    tables = tables_of(member.recipe.model)
    if not tables:
        return {}, plan
    if settled.rewind:
        raise StateLostError(
            f"{settled.reason}; of the rows of tables there are no copies",
            remedy="start again from the newest checkpoint: --resume",
        )
    there = [s for s in standings if s.step == settled.step or not s.stood_by]
    lost = [d for d in begun_under.devices if all(s.device != d for s in standings)]
    given = rows_given(there, {t.name: t.num_rows for t in tables}, lost)
    used = [d.name for d in fleet.devices if d.name in plan.devices]
    lying = {t.name: residence_of(member.recipe, t.name) for t in tables}
    lying |= {p.table: p.residence for p in begun_under.tables if p.residence}
    return given, with_rows(plan, rows_kept(given, used, lying, begun_under.tables), fleet)


def _settle(member: Member, before: Generation, standing: Standing, turn: Turn) -> None:
    """The step in flight counts for all or for none."""
    own, steps = member.belongings, before.steps
    if steps is not None:
        if turn.ballot is not None and standing.is_summed and standing.step == turn.ballot.step:
            steps.complete(turn.ballot)
            own.step, own.samples_seen, own.ballot = steps.number, steps.samples_seen, turn.ballot
            own.kept, own.kept_none = None, ""
        record = steps.abandon()
        if record is not None and record.step < turn.step:
            member.records.append(record)
