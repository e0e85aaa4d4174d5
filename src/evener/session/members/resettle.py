"""The job's store is lost: who may go on meets the others at a standby from now on."""

import socket
from contextlib import suppress
from datetime import timedelta

from evener.core.addresses import host_and_port
from evener.core.membership import Turn
from evener.core.tell import tell
from evener.errors import PeerLostError
from evener.policy.electorate import may_go_on
from evener.session.meeting import store_at
from evener.session.members.member import Generation, Member
from evener.session.members.wishes import leave_on_sigterm

ANSWERS = timedelta(seconds=2)
MOVES_WITHIN_S = 6.0  # a store that is cut off is missed after 3 s, one that has ended after 0.9 s
NUMBERS = 1000  # generations at another store are numbered from the next multiple: rolls given up differ


def resettle(member: Member, before: Generation, why: str) -> str:
    """The sentence where the job goes on as its store is lost; PeerLostError where this device may not."""
    told = move(member, before.turn)
    if not told:
        raise PeerLostError(
            f"{member.here} does not reach the job's store",
            numbers=why,
            remedy="look at the network and at the host of the store; --resume once it is back",
        )
    tell(told)
    member.decisions.append(told)
    return told


def move(member: Member, before: Turn) -> str:
    """Meet at the first standby of `before` that answers from now on; the sentence that says where.

    Empty where this device may not: it is bound to the store that is lost, the job was brought to its end, or
    those who could come are too few to go on.
    """
    meeting, pulse, standby = member.meeting, member.pulse, member.standby
    if pulse is None or standby is None or pulse.is_over or member.here not in before.standbys:
        return ""
    for device, address in before.standbys.items():
        if address == meeting.at or not may_go_on(member.electorates, tuple(before.standbys), address)[0]:
            continue
        at = host_and_port(address)
        try:
            # Looked at first: where nobody listens torch tries again and again.
            socket.create_connection(at, ANSWERS.total_seconds()).close()
            store, beside = store_at(*at, ANSWERS), store_at(*at, ANSWERS)
            meeting.cut_off()  # a look at the store that is lost would go on for long
            pulse.move(beside, MOVES_WITHIN_S)
        except (OSError, RuntimeError):
            continue  # it is lost as well
        meeting.move_to(store, address)
        with suppress(RuntimeError):  # lost meanwhile: the roll finds out
            standby.tell_again(meeting)
        leave_on_sigterm(meeting, member.here)
        if address == standby.address:
            standby.open()
        return f"the job's store is lost; those who are left meet at {address}, on {device}"
    return ""
