"""Delayed exchange: a group moves by its own gradients now and by the other groups' of one step ago.

    step t     own sum S_a(t), weight W_a(t)  ──► on its way to the others while step t + 1 computes
               g = (S_a(t) + Σ S_b(t-1)) / (W_a(t) + Σ W_b(t-1))          b: all other groups

A mean over own samples of this batch and the others' of the batch before; in the first step over own ones
alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from evener.runtime.outer.between import Between, Flat, Summing


class _Part:
    """What this group sends of one step, and what comes of it: own values and the sum of all groups."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.own, self.sum = Flat(parameters), Flat(parameters)
        self.own_tail = torch.zeros(0, dtype=torch.float64)  # weight, who had a gradient
        self.told = self.own_tail  # the same of all groups, then the numbers that go along

    def fill(self, tail: Tensor, numbers: Tensor) -> None:
        self.sum.set_to(self.own)
        self.own_tail, self.told = tail, torch.cat([tail, numbers])


class Late:
    """The other groups' part of each step's gradient, which comes one step late.

    Each step that counts calls `mix`, one that does not `pass_by`. What came in for a step that does not
    count is kept for the next one. `numbers` are float64 that groups sum beside the gradients: `arrived` has
    those of the step before, complete.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], between: Between) -> None:
        self.parameters, self._between = list(parameters), between
        # Two, so that a part is ready when the one before arrives: the link does not wait for copies.
        self._next, self._spare = _Part(self.parameters), _Part(self.parameters)
        self._flying: tuple[_Part, Summing] | None = None
        self._late, self._tail_size = Flat(self.parameters), 1 + len(self.parameters)
        self._late_tail = torch.zeros(self._tail_size, dtype=torch.float64)
        self.arrived: Tensor | None = None
        self.trained = 0.0  # weight of all own steps

    def arrive(self) -> float:
        """Wait for what is on its way; the weight of what the others sent and was not used yet."""
        came = self._landed()
        if came:
            self._take_in(came)
        return float(self._late_tail[0])

    def mix(
        self, views: Sequence[Tensor], had: Sequence[bool], weight: float, numbers: Tensor
    ) -> list[bool] | None:
        """Make the own mean gradients `views` of `weight` those of the step, in place, and send them on.

        `had` says which parameters had a gradient at all; returned is the same with the others'. None where
        the own gradients are NaN or infinite: they are not sent, and the step must not count.
        """
        part = self._next
        part.own.take(views)
        part.own.multiply(weight)
        if not part.own.is_finite:
            self.pass_by(numbers)
            return None
        part.fill(torch.tensor([weight, *map(float, had)], dtype=torch.float64), numbers)
        self._exchange(part)
        self.trained += weight
        whole = weight + float(self._late_tail[0])
        if self._late_tail[0] > 0:
            self._late.add(part.own)
            self._late.multiply(1.0 / whole)
            self._late.give(views)
        found = [h or bool(count > 0) for h, count in zip(had, self._late_tail[1:].tolist(), strict=True)]
        self._late.zero()
        self._late_tail.zero_()
        return found

    def pass_by(self, numbers: Tensor) -> None:
        """This group's part of the step does not count: the others are sent nothing of it."""
        part = self._next
        part.own.zero()
        part.fill(torch.zeros(self._tail_size, dtype=torch.float64), numbers)
        self._exchange(part)

    def _exchange(self, part: _Part) -> None:
        """What was on its way comes in, and `part` leaves."""
        came = self._landed()
        self._flying = part, self._between.start("late", part.sum, part.told)
        self._next, self._spare = self._spare, part
        if came:
            self._take_in(came)

    def _landed(self) -> _Part | None:
        if self._flying is None:
            return None
        part, pending = self._flying
        self._flying = None
        pending.wait()
        return part

    def _take_in(self, came: _Part) -> None:
        self._late.add(came.sum)
        self._late.add(came.own, -1.0)
        self._late_tail += came.told[: self._tail_size] - came.own_tail
        self.arrived = came.told[self._tail_size :].clone()

    def settle(self) -> None:
        """All groups end with one model: the mean of theirs, by the weight each has trained on.

        Called by all devices together. Gradients that are still on their way are waited for and dropped: the
        group that made them has moved by them.
        """
        self.arrive()
        mine = self._next.own
        mine.take(self.parameters)
        mine.multiply(self.trained)
        told = torch.tensor([self.trained], dtype=torch.float64)
        self._between.start("mean", mine, told).wait()
        if float(told) > 0:
            mine.multiply(1.0 / float(told))
            mine.give(self.parameters)

    def own_state(self) -> dict[str, Tensor]:
        """What differs between groups beside weights and optimiser: the others' gradients, not used yet."""
        self.arrive()
        found = {f"late/{i}": b for i, b in enumerate(self._late.buffers)}
        trained = torch.tensor([self.trained], dtype=torch.float64)
        return found | {"late/tail": self._late_tail, "late/trained": trained}

    def restore_own(self, state: dict[str, Tensor]) -> None:
        """Go on where this group was."""
        for i, b in enumerate(self._late.buffers):
            b.copy_(state[f"late/{i}"])
        self._late_tail.copy_(state["late/tail"])
        self.trained = float(state["late/trained"])
