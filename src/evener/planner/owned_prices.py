"""Plans with owners and their prices: what fits, and what it takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from evener.core.job import Job
from evener.core.plan import Held, Ownership, Pipeline, Plan, Share, Stage
from evener.cost.model import CostModel
from evener.cost.owned import OwnedCost, play_owned
from evener.cost.owned_memory import Owners, owners_of
from evener.planner.aim import Aim
from evener.planner.groups import Group

WHOLE = 1000
"""Parts are searched in thousandths."""


@dataclass(frozen=True)
class Draft:
    """Who takes what: samples, micro-batch and part by device, in one order."""

    names: tuple[str, ...]
    samples: tuple[int, ...]
    sizes: tuple[int, ...]
    parts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class OwnedPlan:
    """A plan with owners, its price, and what makes it better than others (see `Aim`)."""

    plan: Plan
    cost: OwnedCost
    value: float
    draft: Draft


@dataclass(kw_only=True)
class OwnedPrices:
    """Prices of plans in which owners keep `held` in parts, over the devices of `groups`.

    Groups must have seconds by layer. A plan fits when every device's predicted bytes stay within its group's
    `usable_bytes`. `priced` are all that were asked for.
    """

    model: CostModel
    job: Job
    aim: Aim
    groups: tuple[Group, ...]
    held: Held
    priced: dict[Draft, OwnedPlan | None] = field(default_factory=dict)
    _limits: dict[tuple[int, float], int] = field(default_factory=dict)

    def price(self, draft: Draft) -> OwnedPlan | None:
        """The draft as a plan with its price; None where a device's memory would not hold it."""
        if draft not in self.priced:
            caps = self.caps(draft.names, draft.sizes)
            found = None
            if all(part <= cap for part, cap in zip(draft.parts, caps, strict=True)):
                plan = self.plan_of(draft)
                cost = play_owned(self.model, plan)
                value = self.aim.value(cost.step_s, plan.devices)
                found = OwnedPlan(plan=plan, cost=cost, value=value, draft=draft)
            self.priced[draft] = found
        return self.priced[draft]

    def least_with(self, device: str) -> float:
        """Seconds of the best plan seen that uses `device`; infinite where none was."""
        priced = (p for p in self.priced.values() if p is not None and device in p.draft.names)
        return min((p.cost.step_s for p in priced), default=float("inf"))

    def plan_of(self, draft: Draft) -> Plan:
        """The draft as a plan."""
        layers = tuple(x.name for x in self.model.profile.layers)
        pipelines = tuple(
            Pipeline(
                samples=n,
                micro_batch=size if n else 1,
                stages=(Stage(layers=layers, shares=(Share(devices=(name,), samples=size if n else 1),)),),
            )
            for name, n, size in zip(draft.names, draft.samples, draft.sizes, strict=True)
        )
        parts = dict(zip(draft.names, draft.parts, strict=True))
        owners = tuple(
            Ownership(layer=x.name, parts=parts, held=self.held)
            for x in self.model.profile.layers
            if x.param_bytes
        )
        return Plan(global_batch=self.job.global_batch, pipelines=pipelines, schedule="1f1b", owners=owners)

    @cached_property
    def usable(self) -> dict[str, float]:
        """Bytes that a plan may fill, by device."""
        return {name: g.usable_bytes for g in self.groups for name in g.names}

    @cached_property
    def _owners(self) -> Owners:
        """Owners over one device, whose parts are set as needed."""
        name = self.groups[0].names[0]
        alone = Draft((name,), (self.job.global_batch,), (1,), (1,))
        return owners_of(self.model.profile, self.model.bytes, self.plan_of(alone))

    def bytes_with(self, size: int, part: float) -> float:
        """What a device holds with this part of 1 and micro-batches of `size` (0: no samples)."""
        owners = self._owners
        (name,) = owners.parts
        owners.parts[name][:] = part  # the one device stands for any
        return owners.memory(name, size).total

    def most_part(self, size: int, usable: float) -> int:
        """The largest part, in thousandths, that fits beside micro-batches of `size`; -1 where none does."""
        key = (size, usable)
        if key not in self._limits:
            low, high = -1, WHOLE
            while low < high:
                middle = (low + high + 1) // 2
                fits = self.bytes_with(size, middle / WHOLE) <= usable
                low, high = (middle, high) if fits else (low, middle - 1)
            self._limits[key] = low
        return self._limits[key]

    def caps(self, names: Sequence[str], sizes: Sequence[int]) -> list[int]:
        """The largest parts, in thousandths, beside these micro-batches."""
        return [self.most_part(size, self.usable[n]) for n, size in zip(names, sizes, strict=True)]

    def largest_size(self, group: Group) -> int:
        """The largest micro-batch that was measured and fits beside no state of one's own; 0 where none."""
        low, high = 0, min(self.model.layers(group.kind).largest, self.job.global_batch)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if self.most_part(middle, group.usable_bytes) >= 0 else (low, middle - 1)
            )
        return low

    def largest_timed(self, name: str) -> int:
        """The largest micro-batch that was timed on the kind of device `name`."""
        return self.model.layers(self.model.fleet.device(name).kind).largest
