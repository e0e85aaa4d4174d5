"""A process that joins a running job: it prepares itself while the others train, then enters a generation."""

import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain, count
from pathlib import Path

from evener.core.fleet import Device, Link
from evener.core.membership import Turn
from evener.core.words import counted
from evener.errors import EnvironmentBrokenError, RefusedError
from evener.session.meeting import FINISHED, POLL_S, Meeting, store_at
from evener.session.members.form import room_of
from evener.session.members.identity import identity_of
from evener.session.members.member import Generation, Member
from evener.session.members.turnover import Planned, next_turn
from evener.session.members.wishes import Answer, Wish, make_wish
from evener.session.planning.measure import micro_batch_grid, profile_here
from evener.session.pulse import begun_key

STORE_TIMEOUT = timedelta(seconds=20)
TRIES = 5


def meeting_at(host: str, port: int) -> Meeting:
    """The meeting of a running job whose store listens at `host`:`port`."""
    try:
        store = store_at(host, port, STORE_TIMEOUT)
    except (RuntimeError, ValueError) as e:
        raise EnvironmentBrokenError(
            f"the job's store at {host}:{port} is not reached: {str(e).partition(chr(10))[0]}",
            remedy="the port must be open between the two hosts",
        ) from e
    return Meeting(store, rank=-1, world_size=2)


def own_profile(member: Member) -> None:
    """Measure this device's kind, unless the job knows it or has no profile at all."""
    known = member.profile
    kind = member.site.device.kind
    if known is None or any(s.kind == kind for s in known.steps):
        return
    sizes = micro_batch_grid(member.recipe.global_batch)
    member.wish_profile = profile_here(member.recipe, member.site, sizes, member.request.profile_s)


def enter(
    member: Member, device: Device, from_step: int = 0, links: tuple[Link, ...] = ()
) -> tuple[int, Turn]:
    """Wish to join until it is granted; (the number of the generation that this device is in, its turn).

    RefusedError with the job's reason; the same when the run has ended meanwhile.
    """
    meeting = member.meeting
    for _ in range(TRIES):
        wish = Wish(
            device=device.name,
            joins=device,
            links=links,
            identity=identity_of(member.request, member.recipe),
            profile=member.wish_profile,
            from_step=from_step,
        )
        number = make_wish(meeting, wish)
        answer = meeting.get_unless(f"answer/{number}", Answer, FINISHED)
        if answer is not None and answer.generation is None:
            raise RefusedError(f"the job refuses: {answer.why_not}", remedy=answer.remedy)
        if answer is None or answer.generation is None or not _has_begun(meeting, answer.generation):
            raise RefusedError("the run has ended before this device could join", remedy="start another run")
        room = meeting.within(room_of(answer.generation))
        planned = room.get("planned", Planned)
        outside = Turn(fleet=planned.fleet, plan=planned.plan, members=planned.members)
        before = Generation(number=answer.generation - 1, room=room, turn=outside)
        found = next_turn(member, before, f"{device.name} joins")
        if found is not None:
            return found
    raise RefusedError(
        f"the job changed {counted(TRIES, 'time')} while this device joined", remedy="try again"
    )


def _has_begun(meeting: Meeting, generation: int) -> bool:
    """Wait until the others stop for `generation`; False when the run ends before.

    Who begins it wakes all, so a device that came from outside would interrupt the step in flight.
    """
    while not meeting.has(begun_key(generation)):
        if meeting.has(FINISHED):
            return False
        time.sleep(POLL_S)
    return True


def free_name(wished: str, taken: Sequence[str]) -> str:
    """`wished`, with a number where a device of the job has that name. Example: lab/cpu gives lab/cpu-2."""
    numbered = (f"{wished}-{number}" for number in count(2))
    return next(name for name in chain([wished], numbered) if name not in taken)


def script_here(script: str, given: Path | None) -> str:
    """The script as this host has it: the one given, or the job's own path."""
    path = given or Path(script)
    if not path.is_file():
        raise RefusedError(
            f"this host has no script {path}",
            remedy="evener train SCRIPT --join …, with the path of the same script here",
        )
    return str(path.resolve())
