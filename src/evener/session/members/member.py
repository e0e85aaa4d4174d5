"""What a process keeps from one generation of devices to the next, and the state it hands over."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from evener.core.faults import Fault
from evener.core.membership import Ballot, Electorate, ScaleState, Standing, Turn
from evener.core.profile import Profile
from evener.core.records import StepRecord
from evener.core.seams import Channel
from evener.runtime.kept import Kept
from evener.runtime.state import export_state, import_state
from evener.session.checkpoints.state import partly_seen
from evener.session.checkpoints.tensors import saved_tensors
from evener.session.layout.tables import tables_of
from evener.session.loop.steps import Steps
from evener.session.meeting import Meeting
from evener.session.members.copies import Copies
from evener.session.members.handover import State
from evener.session.members.passage import Stopwatch
from evener.session.members.rows import held_rows
from evener.session.members.standby import Standby
from evener.session.pulse import Pulse
from evener.session.recipe import Recipe
from evener.session.request import Request
from evener.session.site import Site


@dataclass
class Belongings:
    """The state that this process has: `live` values as of before `step`, and copies of earlier ones.

    `live` has, by name, the tensor and the optimiser that keeps more for it.
    """

    live: dict[str, tuple[Tensor, torch.optim.Optimizer]] = field(default_factory=dict)
    step: int = 0
    samples_seen: int = 0
    loss_scale: ScaleState | None = None
    copies: Copies = field(default_factory=Copies)
    ballot: Ballot | None = None  # of the newest step that was concluded, in whichever generation
    kept: Kept | None = None  # of the step in flight when the generation ended
    kept_none: str = ""  # why nothing is

    def state_of(self, name: str) -> State:
        """What goes to another device that is to hold `name`."""
        tensor, optimizer = self.live[name]
        return export_state({name: tensor}, optimizer)

    def take_over(self, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
        """What is live here already moves to the `tensors` and the `optimizer` of the next generation."""
        for name, tensor in tensors.items():
            if name in self.live:
                before, keeper = self.live[name]
                if tensor is not before:
                    tensor.detach().copy_(before.detach())
                if keeper is optimizer or before not in keeper.state:
                    continue
                kept = keeper.state[before]
                if all(v.device == tensor.device for v in _like(tensor, kept)):
                    optimizer.state[tensor] = kept
                else:  # from a card to its host, say, as the plan now has it
                    import_state(export_state({name: before}, keeper), {name: tensor}, optimizer)

    def fill(
        self, states: Mapping[str, State], tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        """Make `tensors` what `states` say, each under its name."""
        for name, state in states.items():
            import_state(state, {name: tensors[name]}, optimizer)


def _like(p: Tensor, kept: Mapping[str, Any]) -> list[Tensor]:
    """What an optimiser keeps for `p` in its shape; counts of steps are where torch wants them."""
    return [v for key, v in kept.items() if isinstance(v, Tensor) and v.shape == p.shape and key != "step"]


@dataclass
class Member:
    """This process in the job: what was asked, where it meets the others, and what it has."""

    request: Request
    meeting: Meeting
    recipe: Recipe
    site: Site
    pulse: Pulse | None
    given: Profile | None = None  # by the user, or measured at the start, where this process has it
    belongings: Belongings = field(default_factory=Belongings)
    wish_profile: Profile | None = None  # of a kind that the job had not measured
    has_begun: bool = False  # once a generation was formed: state is defined from then on
    faults: list[Fault] | None = None  # scripted ones of this device that have not struck; None: not begun
    decisions: list[str] = field(default_factory=list)
    unsaved: list[str] = field(default_factory=list)  # why checkpoints failed, in all generations
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    records: list[StepRecord] = field(default_factory=list)  # of steps with the seconds of this device alone
    standby: Standby | None = None
    electorates: tuple[Electorate, ...] = ()  # of the generations that this device may be the rest of

    @property
    def here(self) -> str:
        """The name of this process's device."""
        return self.site.device.name

    @property
    def serves(self) -> str:
        """Where this device serves a standby for the store in use, "host:port"; empty where it does not."""
        serves = self.standby.address if self.standby else ""
        return serves if serves != self.meeting.at else ""

    @property
    def profile(self) -> Profile | None:
        """What is known of each kind: in the store, so that any device can plan and joiners can add."""
        if self.meeting.has("profile"):
            return self.meeting.get("profile", Profile)
        return self.given

    @property
    def names(self) -> tuple[str, ...]:
        """Everything of the model that has state."""
        return tuple(saved_tensors(self.recipe.model))


@dataclass
class Generation:
    """A set of devices and a plan, from its forming to the next change.

    `steps` is None on a device without a part in the plan; `held` are the tensors that this one holds.
    """

    number: int
    room: Meeting
    turn: Turn
    steps: Steps | None = None
    held: dict[str, Tensor] = field(default_factory=dict)
    channels: list[Channel] = field(default_factory=list)

    @property
    def used(self) -> tuple[str, ...]:
        """The devices with a part in the plan, in the fleet's order: the first one leads the run."""
        return tuple(d.name for d in self.turn.fleet.devices if d.name in self.turn.plan.devices)

    @property
    def has_moved(self) -> bool:
        """Whether a step was committed: its members then have what they were to get, and who left is gone."""
        return self.steps is not None and self.steps.number > self.turn.step

    def open(self, channel: Channel | None) -> None:
        """A channel of this generation, to be ended with it."""
        if channel is not None:
            self.channels.append(channel)

    def wake(self, reason: str) -> None:
        """End every wait for another device; from any thread."""
        self.room.sockets.shut()
        for channel in self.channels:
            channel.abort(reason)

    def standing(self, member: Member) -> Standing:
        """Where this device stands at the generation's end, as the others need to know it."""
        own, steps = member.belongings, self.steps
        if steps is not None and self.has_moved:
            # Until a step is taken, what a device held in the generation before is as good as ever.
            own.step, own.samples_seen = steps.number, steps.samples_seen
            own.live = {n: kept for n, kept in own.live.items() if n in self.held}
        if steps is not None:
            own.kept, own.kept_none = steps.keep()
        executor = steps.executor if steps else None
        if steps is not None and steps.loss_scale:
            own.loss_scale = steps.loss_scale.state
        own.ballot = (executor and executor.ballot) or own.ballot
        return Standing(
            device=member.here,
            step=own.step,
            samples_seen=own.samples_seen,
            holds=tuple(own.live),
            partly=tuple(n for n in partly_seen(steps) if n in own.live) if steps else (),
            loss_scale=own.loss_scale,
            ballot=own.ballot,
            is_summed=executor is not None and executor.awaits_ballot == own.step,
            stood_by=steps is None,
            snapshots=own.copies.snapshots,
            kept=own.kept.ranges if own.kept and own.kept.number == own.step else (),
            kept_none=own.kept_none,
            rows=held_rows(tables_of(member.recipe.model)),
        )
