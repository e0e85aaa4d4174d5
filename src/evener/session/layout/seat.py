"""A plan as one device takes part in it: with whom, and how it reaches them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from evener.core.fleet import Fleet
from evener.core.plan import Plan
from evener.core.seams import Wire
from evener.runtime.ranks import Ranks
from evener.session.meeting import Meeting
from evener.session.recipe import Recipe
from evener.session.site import Site, backend_of


@dataclass(frozen=True, kw_only=True)
class Seat:
    """This device among those of `plan`, which have met and joined one group, in the order of `ranks`.

    With `rehearse` its site is paced as the fleet says; `seed` is that of rounding and of tables' rows.
    `goes_on`: the job is under way, and those rows are where they were. `folder` is the run's, on this host.
    """

    recipe: Recipe
    plan: Plan
    ranks: Ranks
    site: Site
    fleet: Fleet
    meeting: Meeting
    rehearse: bool = False
    seed: int = 0
    goes_on: bool = False
    folder: str = "."

    def new_group(self, devices: Sequence[str], backend: str | None = None) -> dist.ProcessGroup:
        """The process group of some devices of the plan; made by all of the plan together.

        Without `backend` of what these devices talk with, whatever reaches all of the plan.
        """
        ranks = [self.ranks.devices.index(d) for d in devices]
        return self.meeting.new_group(ranks, backend or backend_of(self.fleet, tuple(devices)))

    def wire(self, among: tuple[str, ...], group: dist.ProcessGroup | None = None) -> Wire:
        """The wire among some devices over `group`; None is the group that all joined."""
        return self.site.wire(self.fleet, among, rehearse=self.rehearse, group=group)

    def connect(self, among: tuple[str, ...]) -> Wire:
        """A wire among some devices over a group of their own; made by all of the plan together."""
        return self.wire(among, self.new_group(among))
