"""One device's part of state that is held in parts: what it owns, and how that is brought together.

optimizer    parameters whole, gradients whole      own: the optimiser's state     (ZeRO stage 1)
gradients    parameters whole                       own: that, gradients           (stage 2)
parameters                                          own: all three                 (stage 3)
"""

from collections.abc import Iterator
from dataclasses import dataclass
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
from evener.runtime.owning.means import Means
from evener.runtime.owning.optimizer import cannot_cut, over_pieces
from evener.runtime.owning.spreading import Spreading
from evener.runtime.owning.units import Unit, units_of_model
from evener.runtime.reducers import Reducers, owners_reducers

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
    """This device's part of `model` under the plan's owners; the model's parameters move to the device.

    `optimizer`, which has not moved yet, from now on moves what this device owns. `reducers` are the sums of
    gradients. Called by all devices of the plan together.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        means: Means,
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
        whole = {id(p) for p in cannot_cut(optimizer)}
        self.uncut = tuple(n for n, p in model.named_parameters() if id(p) in whole and p.requires_grad)
        holds_parameters = self.held == "parameters"
        self.units = units_of_model(model, plan, whole=self.uncut, frozen=holds_parameters, limit=unit_bytes)
        kind = Gathering if holds_parameters else Spreading
        self.parameters = kind(model, self.units, means, self._waited)
        self.pieces = [
            list(self._pieces_of(u, own)) for u, own in zip(self.units, self.parameters.own, strict=True)
        ]
        mine = {piece.whole: piece for held in self.pieces for piece in held}
        trained = {p: piece.values for p, piece in mine.items() if p.requires_grad}
        over_pieces(optimizer, trained, {p: piece.start for p, piece in mine.items()})
        self._after_move = optimizer.register_step_post_hook(lambda *_: self.parameters.after_move())
        self.gradients = OwnedGradients(
            self.units,
            {u.number: {x.name: (x.values, at) for x, at in self._placed(u)} for u in self.units},
            self.ranks,
            means.post,
            means.wire,
            device=means.device,
            in_rounds=self.held != "optimizer",
        )
        if isinstance(self.parameters, Gathering):
            self.parameters.is_done = self.gradients.is_done
        self._waits: list[tuple[str, float, float, Cause]] = []
        stages = {number: stage for number, _, stage in plan.numbered_stages()}
        self._stage_of = {s.shares[0].devices[0]: number for number, s in stages.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that are held in parts, by the user's names."""
        return tuple(name for unit in self.units for name in unit.named)

    def bytes_by_device(self) -> dict[str, int]:
        """Bytes of the parameters that each device owns."""
        sizes = [unit.sizes for unit in self.units]
        return {d: sum(s[d] for s in sizes) for d in self.ranks.devices}

    def reducers(self) -> Reducers:
        """The sums of a step for the executor."""
        return owners_reducers(self.gradients, self._stage_of[self.ranks.here])

    def begin_step(self, number: int, portions: Portions, *, trains: bool) -> None:
        """A step, or forwards alone, over `portions` begins; called by all devices."""
        rounds = {d: portions.num_backwards(stage, d) for d, stage in self._stage_of.items()}
        self._waits.clear()
        self.parameters.begin_step(rounds, trains=trains)
        if trains:
            self.gradients.begin_step(number, rounds)

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
            self.means.wire.all_reduce(had, f"unit {unit.number}, whose gradients").wait()
            others = [d for d in self.ranks.devices if d != here]
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
        self.gradients.close()
        self.parameters.close()

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
