"""The leading device's ear for wishes: prepares the next generation while all train, then gives notice.

wish ──► checked ──► fleet and plan for the next generation ──► in the store ──► its number goes round with
                                                                                 the next step's tally
"""

import threading
from collections.abc import Sequence

from msgspec.structs import replace

from evener.core.fleet import Device, Link
from evener.core.plan import Plan
from evener.errors import EvenerError
from evener.profiling import merge_profiles
from evener.session.meeting import Meeting
from evener.session.members.form import room_of
from evener.session.members.identity import identity_of
from evener.session.members.member import Generation, Member
from evener.session.members.plans import next_plan
from evener.session.members.turnover import Planned
from evener.session.members.wishes import ANOTHER_NAME, WISHES, Answer, Wish

EVERY_S = 0.1


class Changes:
    """Prepares changes in a thread of its own; `notice()` is the generation that is ready, 0 for none.

    One change at a time: what is wished meanwhile is answered by the next generation.
    """

    def __init__(self, member: Member, generation: Generation) -> None:
        self._member, self._generation = member, generation
        self._meeting: Meeting = member.meeting.connected()
        self._ready = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="changes", daemon=True)

    def start(self) -> None:
        """Listen from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Prepare nothing any more; returns when nothing is under way."""
        self._over.set()
        self._thread.join()

    def notice(self) -> int:
        """The number of the generation that was prepared, 0 while there is none."""
        return self._ready

    def propose(self, plan: Plan, why: str) -> None:
        """Go on with `plan` under which devices hold other layers than now; the same devices."""
        turn = self._generation.turn
        self._prepare(Planned(fleet=turn.fleet, plan=plan, members=turn.stays, reasons=(why,)))

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            try:
                self._look()
            except RuntimeError:
                return  # the store is gone: the pulse says so

    def _look(self) -> None:
        assert self._generation.steps is not None
        step = self._generation.steps.number
        for number in range(1, self._meeting.store.add(WISHES, 0) + 1):
            if self._ready or not self._meeting.has(f"wish/{number}"):
                continue
            wish = self._meeting.get(f"wish/{number}", Wish)
            if wish.from_step > step or self._is_answered(number, wish):
                continue
            try:
                planned = self._granted(wish)
            except EvenerError as e:
                self._refuse(number, wish, f"{e.what} {e.numbers}".strip(), e.remedy)
                continue
            except Exception as e:  # of planning with what a guest brought: it must not end the job
                self._refuse(number, wish, f"{type(e).__name__}: {e}")
                continue
            if self._prepare(planned):
                self._meeting.put(f"answer/{number}", Answer(generation=self._ready))

    def _refuse(self, number: int, wish: Wish, why: str, remedy: str = "") -> None:
        what = "leave" if wish.leaves else "join"
        self._member.decisions.append(f"{wish.device} wished to {what} and may not: {why}")
        self._meeting.put(f"answer/{number}", Answer(why_not=why, remedy=remedy))

    def _is_answered(self, number: int, wish: Wish) -> bool:
        """A leave that was granted for a generation that came about otherwise is still to come."""
        key = f"answer/{number}"
        if not self._meeting.has(key):
            return False
        granted = self._meeting.get(key, Answer).generation
        still_here = wish.leaves and wish.device in self._generation.turn.stays
        return granted is None or granted > self._generation.number or not still_here

    def _granted(self, wish: Wish) -> Planned:
        return self._without(wish) if wish.leaves else self._with(wish)

    def _without(self, wish: Wish) -> Planned:
        turn, member = self._generation.turn, self._member
        stays = tuple(d.name for d in turn.fleet.devices if d.name != wish.device)
        if wish.device not in turn.stays or not stays:
            raise EvenerError(f"{wish.device} is the job's only device")
        fleet = turn.fleet.only(stays)
        plan, why = next_plan(
            member.request, member.recipe, member.profile, fleet, self._plan(), [wish.device]
        )
        return Planned(
            fleet=fleet,
            plan=plan,
            members=turn.stays,
            leaves=(wish.device,),
            reasons=(f"{wish.device} leaves as it was asked to", why),
        )

    def _with(self, wish: Wish) -> Planned:
        turn, member, device = self._generation.turn, self._member, wish.joins
        if device is None or wish.identity is None or device.name != wish.device:
            raise EvenerError(f"{wish.device} did not say what it is")
        if device.name in turn.stays:
            raise EvenerError(f"there is a device {device.name} in the job", remedy=ANOTHER_NAME)
        differs = identity_of(member.request, member.recipe).differs(wish.identity)
        if differs:
            raise EvenerError(f"{device.name} has {differs}", remedy="make it the same as the job's")
        devices, links = (*turn.fleet.devices, device), turn.fleet.links
        fleet = replace(turn.fleet, devices=devices, links=(*links, *_new(wish.links, links, devices)))
        profile = member.profile
        if profile is not None and wish.profile is not None:
            profile = merge_profiles((profile, wish.profile))
            self._meeting.put("profile", profile)
        plan, why = next_plan(
            member.request, member.recipe, profile, fleet, self._plan(), [], joined=[device.name]
        )
        return Planned(
            fleet=fleet,
            plan=plan,
            members=(*turn.stays, device.name),
            reasons=(f"{device.name} joins", why),
        )

    def _plan(self) -> Plan:
        assert self._generation.steps is not None
        return self._generation.steps.plan

    def _prepare(self, planned: Planned) -> bool:
        """Put the change where all find it; False when there is one already."""
        number = self._generation.number + 1
        with self._lock:
            if self._ready or self._over.is_set():
                return False
            self._meeting.within(room_of(number)).put("planned", planned)
            self._ready = number
        return True


def _new(brought: Sequence[Link], known: Sequence[Link], devices: Sequence[Device]) -> tuple[Link, ...]:
    """The links that a joiner brings which have both ends here and are not known yet."""
    ends = {d.name for d in devices} | {d.host for d in devices}
    pairs = {frozenset((x.a, x.b)) for x in known}
    return tuple(x for x in brought if {x.a, x.b} <= ends and frozenset((x.a, x.b)) not in pairs)


def changes_of(member: Member, generation: Generation) -> Changes | None:
    """Listening on the leading device of an elastic job; None elsewhere."""
    steps = generation.steps
    if member.pulse is None or steps is None or steps.ranks.rank:
        return None
    changes = Changes(member, generation)
    steps.notice = changes.notice
    changes.start()
    return changes
