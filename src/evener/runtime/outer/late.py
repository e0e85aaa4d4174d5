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


class Late:
    """The other groups' part of each step's gradient, which comes one step late.

    Within a step: `arrive`, then `mix` or, where the step does not count here, `pass_by`. What came in for a
    step that does not count is kept for the next one. `numbers` are float64 that groups sum beside the
    gradients: `arrived` has those of the step before, complete.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], between: Between) -> None:
        self.parameters, self._between = list(parameters), between
        self._own, self._sum = Flat(self.parameters), Flat(self.parameters)
        self._late, self._tail_size = Flat(self.parameters), 1 + len(self.parameters)
        self._late_tail = torch.zeros(self._tail_size, dtype=torch.float64)  # weight, who had a gradient
        self._own_tail = torch.zeros(self._tail_size, dtype=torch.float64)
        self._told = torch.zeros(0, dtype=torch.float64)
        self._pending: Summing | None = None
        self.arrived: Tensor | None = None
        self.trained = 0.0  # weight of all own steps

    def arrive(self) -> float:
        """Wait for what is on its way; the weight of what the others sent and was not used yet."""
        if self._pending:
            pending, self._pending = self._pending, None
            pending.wait()
            self._late.add(self._sum)
            self._late.add(self._own, -1.0)
            self._late_tail += self._told[: self._tail_size] - self._own_tail
            self.arrived = self._told[self._tail_size :].clone()
        return float(self._late_tail[0])

    def mix(
        self, views: Sequence[Tensor], had: Sequence[bool], weight: float, numbers: Tensor
    ) -> list[bool] | None:
        """Make the own mean gradients `views` of `weight` those of the step, in place, and send them on.

        `had` says which parameters had a gradient at all; returned is the same with the others'. None where
        the own gradients are NaN or infinite: they are not sent, and the step must not count.
        """
        self._own.take(views)
        self._own.multiply(weight)
        if not self._own.is_finite:
            self.pass_by(numbers)
            return None
        flags = [float(h) for h in had]
        self._send(torch.tensor([weight, *flags], dtype=torch.float64), numbers)
        self.trained += weight
        whole = weight + float(self._late_tail[0])
        if self._late_tail[0] > 0:
            self._late.add(self._own)
            self._late.multiply(1.0 / whole)
            self._late.give(views)
        found = [h or bool(count > 0) for h, count in zip(had, self._late_tail[1:].tolist(), strict=True)]
        self._late.zero()
        self._late_tail.zero_()
        return found

    def pass_by(self, numbers: Tensor) -> None:
        """This group's part of the step does not count: the others are sent nothing of it."""
        self._own.zero()
        self._send(torch.zeros(self._tail_size, dtype=torch.float64), numbers)

    def _send(self, tail: Tensor, numbers: Tensor) -> None:
        assert not self._pending
        self._own_tail = tail
        self._sum.set_to(self._own)
        self._told = torch.cat([tail, numbers])
        self._pending = self._between.start("late", self._sum, self._told)

    def settle(self) -> None:
        """All groups end with one model: the mean of theirs, by the weight each has trained on.

        Called by all devices together. Gradients that are still on their way are waited for and dropped: the
        group that made them has moved by them.
        """
        self.arrive()
        mine = self._own
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
