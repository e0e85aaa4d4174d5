"""One device's part of state that is held in parts: what it owns, and how that is brought together.

optimizer    parameters whole, gradients whole      own: the optimiser's state     (ZeRO stage 1)
gradients    parameters whole                       own: that, gradients           (stage 2)
parameters                                          own: all three                 (stage 3)

Where pipelines cut the model, each segment's gradients go among its own holders, and parameters without
owners are summed over their holders as ever.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from evener.core.buckets import BUCKET_BYTES
from evener.core.ownership import held_by
from evener.core.plan import Plan
from evener.core.trace import Cause
from evener.errors import PlanMismatchError
from evener.runtime.owning.gathering import Gathering
from evener.runtime.owning.gradients import OwnedGradients
from evener.runtime.owning.held import HeldStages, whole
from evener.runtime.owning.means import Means
from evener.runtime.owning.optimizer import cannot_cut, over_pieces
from evener.runtime.owning.spreading import Spreading
from evener.runtime.owning.units import Unit, units_of_model
from evener.runtime.ranks import Ranks
from evener.runtime.reducers import Reducers, owners_reducers
from evener.runtime.segments import Segment

GRADIENTS = 0x30000  # tag of whole gradients, which only a comparison asks for


class Portions(Protocol):
    """Who takes how many micro-batches of a step."""

    def num_backwards(self, stage: int, device: str) -> int: ...


@dataclass(frozen=True)
class Piece:
    """What this device owns of the parameter `name`: `values`, from its value number `start` on."""

    name: str
    whole: nn.Parameter
    start: int
    values: nn.Parameter

    @property
    def is_all(self) -> bool:
        return self.values.shape == self.whole.shape


class Owned:
    """This device's part of `model` under the plan's owners; what is in parts moves to the device.

    `held` says what the device holds where pipelines cut the model. `optimizer`, made over all of the model
    and not moved yet, from now on moves what this device owns, and what it holds that has no owners.
    `reducers` are the sums of gradients. Called by all devices of the plan together.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        means: Means,
        held: HeldStages | None = None,
        *,
        unit_bytes: float = BUCKET_BYTES,
    ) -> None:
        kinds = {o.held for o in plan.owners}
        if len(kinds) > 1:
            raise PlanMismatchError(
                f"the plan holds {' and '.join(sorted(kinds))} of different layers in parts",
                remedy="one `held` for all layers",
            )
        self.held = held_by(plan)
        self.model, self.optimizer, self.means = model, optimizer, means
        self.ranks = means.ranks
        self.stages = held or whole(model, plan, means)
        here, segments = self.ranks.here, self.stages.segments
        uncut = {id(p) for p in cannot_cut(optimizer)}
        self.uncut = tuple(n for n, p in model.named_parameters() if id(p) in uncut and p.requires_grad)
        gathers = self.held == "parameters"
        self.everyones = units_of_model(
            model, plan, segments=segments, whole=self.uncut, frozen=gathers, limit=unit_bytes
        )
        self.units = tuple(u for u in self.everyones if here in u.spans)
        self.parameters: Gathering | Spreading = (
            Gathering(model, self.units, means, self._waited)
            if gathers
            else Spreading(self.stages, self.units, means, self._waited)
        )
        self.pieces = {
            u.number: list(self._pieces_of(u, own))
            for u, own in zip(self.units, self.parameters.own, strict=True)
        }
        mine = {piece.whole: piece for pieces in self.pieces.values() for piece in pieces}
        moved = self._without_owners() | {p: x.values for p, x in mine.items() if p.requires_grad}
        over_pieces(optimizer, moved, {p: mine[p].start if p in mine else 0 for p in moved})
        self._after_move = optimizer.register_step_post_hook(lambda *_: self.parameters.after_move())
        self.gradients = {s.stages: self._gradients_of(s) for s in segments if self._trains(s)}
        if isinstance(self.parameters, Gathering):
            (gradients,) = self.gradients.values()
            self.parameters.is_done = gradients.is_done
        self._waits: list[tuple[str, float, float, Cause]] = []
        self._holders = {n: [d for x in s.shares for d in x.devices] for n, _, s in plan.numbered_stages()}

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that are held in parts, by the user's names."""
        return tuple(name for unit in self.units for name in unit.named)

    def bytes_by_device(self) -> dict[str, int]:
        """Bytes of the parameters that each device owns."""
        sizes = [unit.sizes for unit in self.everyones]
        return {d: sum(s.get(d, 0) for s in sizes) for d in self.ranks.devices}

    def reducers(self, others: Reducers | None = None) -> Reducers:
        """The sums of a step for the executor; `others` are those of parameters without owners."""
        here = frozenset(self.stages.modules)
        return owners_reducers([(stages & here, g) for stages, g in self.gradients.items()], others)

    def others(self) -> list[Segment]:
        """The segments without what is in parts."""
        owned = {n for u in self.everyones for n in u.named}
        rest = [replace(s, names=tuple(n for n in s.names if n not in owned)) for s in self.stages.segments]
        return [s for s in rest if s.names]

    def begin_step(self, number: int, portions: Portions, *, trains: bool) -> None:
        """A step, or forwards alone, over `portions` begins; called by all devices."""
        self._waits.clear()
        rounds = {s.stages: self._rounds(s, portions) for s in self.stages.segments}
        if isinstance(self.parameters, Gathering):
            self.parameters.begin_step(*rounds.values(), trains=trains)
        for stages, gradients in self.gradients.items() if trains else ():
            gradients.begin_step(number, rounds[stages])

    def end_step(self) -> None:
        """All forwards and backwards are done here; returns when nobody needs this device's values."""
        self.parameters.end_step()

    def take_waits(self) -> list[tuple[str, float, float, Cause]]:
        """(action, start, end, cause) of each wait that showed since it was last asked."""
        waits, self._waits = self._waits, []
        return waits

    def whole_gradients(self) -> dict[str, Tensor]:
        """Every parameter's gradient as the optimiser is about to use it; called by all devices together."""
        found: dict[str, Tensor] = {}
        post, here = self.means.post, self.ranks.here
        for unit in self.units:
            flat = torch.zeros(unit.count, dtype=unit.dtype)
            first, last = unit.spans[here]
            had = torch.zeros(len(unit.named))
            for piece, at in self._placed(unit):
                if piece.values.grad is not None:
                    start = first + at
                    flat[start : start + piece.values.numel()] = piece.values.grad.detach().reshape(-1).cpu()
                    had[list(unit.named).index(piece.name)] = 1.0
            wire = self.stages.wires[tuple(unit.spans)]
            wire.all_reduce(had, f"unit {unit.number}, whose gradients").wait()
            others = [d for d in unit.spans if d != here]
            sends = [post.send(flat[first:last], d, GRADIENTS) for d in others if last > first]
            for owner in unit.owners():
                if owner != here:
                    post.receive(flat[slice(*unit.spans[owner])], owner, GRADIENTS).wait()
            for sent in sends:
                sent.wait()
            for (name, p, (start, end)), any_had in zip(unit.places(), had.tolist(), strict=True):
                if any_had:
                    found[name] = flat[start:end].view(p.shape)
        return found

    def close(self) -> None:
        """Let go of the model and of the optimiser."""
        self._after_move.remove()
        for gradients in self.gradients.values():
            gradients.close()
        self.parameters.close()

    def _without_owners(self) -> dict[nn.Parameter, nn.Parameter]:
        """The parameters that are held here as ever."""
        named = dict(self.model.named_parameters())
        held = [named[n] for s in self.others() if self.ranks.here in s.devices for n in s.names]
        return dict(zip(held, held, strict=True))

    def _trains(self, segment: Segment) -> bool:
        units = [u for u in self.units if u.stages == segment.stages]
        return any(p.requires_grad for u in units for p in u.named.values())

    def _gradients_of(self, segment: Segment) -> OwnedGradients:
        units = [u for u in self.units if u.stages == segment.stages]
        return OwnedGradients(
            units,
            {u.number: {x.name: (x.values, at) for x, at in self._placed(u)} for u in units},
            replace(
                self.means,
                ranks=Ranks(segment.devices, self.ranks.here),
                wire=self.stages.wires[segment.devices],
            ),
            self._waited,
            in_rounds=self.held != "optimizer",
        )

    def _rounds(self, segment: Segment, portions: Portions) -> dict[str, int]:
        """How many backwards each holder of the segment will have."""
        return {
            d: sum(portions.num_backwards(n, d) for n in segment.stages if d in self._holders[n])
            for d in segment.devices
        }

    def _pieces_of(self, unit: Unit, own: Tensor) -> Iterator[Piece]:
        first = unit.spans[self.ranks.here][0]
        starts = {name: start for name, _, (start, _) in unit.places()}
        for name, p, (low, high) in unit.pieces_of(self.ranks.here):
            at = starts[name] + low - first
            values = own[at : at + high - low]
            if high - low == p.numel():
                values = values.view(p.shape)
            yield Piece(name, p, low, nn.Parameter(values, requires_grad=p.requires_grad))

    def _placed(self, unit: Unit) -> Iterator[tuple[Piece, int]]:
        """(piece, where it begins in this device's span of the unit)."""
        first = unit.spans[self.ranks.here][0]
        starts = {name: start for name, _, (start, _) in unit.places()}
        for piece in self.pieces[unit.number]:
            yield piece, starts[piece.name] + piece.start - first

    def _waited(self, action: str, since: float) -> None:
        now = self.means.now()
        if now > since:
            self._waits.append((action, since, now, "transfer"))
