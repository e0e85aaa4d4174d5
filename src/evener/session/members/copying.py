"""When devices copy each other's state: before every n-th step, where only one device holds some layer."""

from evener.core.membership import Snapshot
from evener.session.checkpoints.state import holders_of
from evener.session.members.copies import copy_moves, exchange
from evener.session.members.member import Generation, Member


class Copying:
    """Keeps copies while a generation trains; `at_boundary` is called before each step by all devices."""

    def __init__(self, member: Member, generation: Generation) -> None:
        assert generation.steps is not None
        self._member, self._generation, self._steps = member, generation, generation.steps
        hosts = {d.name: d.host for d in generation.turn.fleet.devices if d.name in generation.used}
        every = member.request.snapshot_every
        self._route = copy_moves(holders_of(self._steps), hosts) if member.pulse and every else ()
        self._every = every
        self._first, self._last = self._steps.number, -1

    def at_boundary(self, number: int) -> None:
        """Copies of the state before step `number`, if it is one of those, here and at the neighbour."""
        if not self._route or number == self._last:
            return
        if number != self._first and number % self._every:
            return
        self._last = number
        channel = self._steps.layout.holding.channel
        assert channel is not None, "a plan in which only one device holds a layer has a channel"
        own, steps = self._member.belongings, self._steps
        steps.scopes.hand_out()  # copies of statistics are of all waves
        scale = steps.loss_scale.state if steps.loss_scale else None
        exchange(
            own.copies,
            self._route,
            self._member.here,
            list(self._generation.held),
            own.state_of,
            channel,
            self._generation.room,
            Snapshot(step=number, samples_seen=steps.samples_seen, loss_scale=scale),
        )
