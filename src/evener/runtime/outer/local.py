"""Local steps: groups train by themselves, then the mean change of their weights moves all by an outer SGD.

    anchor ──► group a: H steps ──► p_a        Δ      = Σ W_g · (anchor - p_g) / Σ W_g
           └─► group b: H steps ──► p_b        anchor = anchor - SGD(Δ)          all go on from there

W_g is the weight (samples, or what the recipe counts) that group g has trained on since the last meeting:
hosts with uneven work count by what they did. This is DiLoCo (arXiv 2311.08105) with that weighting.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from evener.errors import NonFiniteError
from evener.runtime.outer.between import Between, Flat

_SLOTS = 2  # of each group: weight, and 1 where its weights are not finite


@dataclass(frozen=True)
class Group:
    """Which of `names` (one a group, by its first member) this device is in."""

    names: tuple[str, ...]
    number: int

    @property
    def name(self) -> str:
        return self.names[self.number]


class LocalSteps:
    """The outer step of a job whose groups take `every` steps by themselves.

    Anchor and momentum lie in host memory, the same on every device. `numbers` that are handed to `meet` are
    summed over groups on the way.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        inner: torch.optim.Optimizer,
        between: Between,
        group: Group,
        outer: tuple[int, float, float],
        on_non_finite: Literal["stop", "skip"] = "stop",
    ) -> None:
        self.every, rate, momentum = outer
        self._parameters, self._inner, self._between, self._group = list(parameters), inner, between, group
        self._on_non_finite = on_non_finite
        self.anchor, self._change = Flat(self._parameters), Flat(self._parameters)
        self.anchor.take(self._parameters)
        self._outer = torch.optim.SGD(
            [nn.Parameter(b) for b in self.anchor.buffers],
            lr=rate,
            momentum=momentum,
            nesterov=momentum > 0,
            foreach=False,
        )
        self.weight, self.steps = 0.0, 0  # of this group since the last meeting

    def took(self, weight: float) -> bool:
        """This group took a step of `weight` (0: it was skipped); whether all groups are to meet now."""
        self.weight += weight
        self.steps += 1
        return self.steps >= self.every

    def meet(self, numbers: Tensor) -> list[str]:
        """All groups move by their mean change; called by all devices together. Sentences on what was odd.

        `numbers` are summed over groups in place. NonFiniteError on all devices where the weights of a group
        are NaN or infinite and that is to stop the job; else its work does not count, it goes on from the
        others', and its inner optimiser begins anew.
        """
        change = self._change
        change.take(self._parameters)
        change.multiply(-1.0)
        change.add(self.anchor)
        bad = not change.is_finite
        weight = 0.0 if bad else self.weight
        change.multiply(weight)
        if bad:
            change.zero()
        slots = torch.zeros(_SLOTS * len(self._group.names), dtype=torch.float64)
        mine = _SLOTS * self._group.number
        slots[mine], slots[mine + 1] = weight, float(bad)
        told = torch.cat([slots, numbers])
        self._between.start("outer", change, told).wait()
        numbers.copy_(told[len(slots) :])
        self.weight, self.steps = 0.0, 0
        return self._move(told[: len(slots)].view(-1, _SLOTS))

    def _move(self, told: Tensor) -> list[str]:
        whole = float(told[:, 0].sum())
        named = [n for n, bad in zip(self._group.names, told[:, 1].tolist(), strict=True) if bad]
        sentences = [f"the weights of the group of {name} are NaN or infinite" for name in named]
        if whole:
            self._change.multiply(1.0 / whole)
            if not self._change.is_finite:
                sentences.append("the mean change of all weights is NaN or infinite")
        if sentences and self._on_non_finite == "stop":
            raise NonFiniteError(
                "; ".join(sentences),
                numbers=f"weight of the round {whole:g}",
                remedy='a lower learning rate or max_norm; on_non_finite="skip" leaves such work out',
            )
        if whole and self._change.is_finite:
            anchors = self._outer.param_groups[0]["params"]
            for anchor, change in zip(anchors, self._change.buffers, strict=True):
                anchor.grad = change
            self._outer.step()
        self.anchor.give(self._parameters)
        if self._group.name in named:
            self._inner.state.clear()
        end = "that work does not count, and all go on from the last agreed weights"
        return [f"{sentence}: {end}" for sentence in sentences]

    def begin(self) -> None:
        """The weights that this device has now, the same on all, are where the round begins."""
        self.anchor.take(self._parameters)

    def state(self) -> dict[str, Tensor]:
        """The outer state, the same on every device: anchors and momenta by number."""
        found = {f"anchor/{i}": b for i, b in enumerate(self.anchor.buffers)}
        for i, p in enumerate(self._outer.param_groups[0]["params"]):
            momentum = self._outer.state.get(p, {}).get("momentum_buffer")
            if momentum is not None:
                found[f"momentum/{i}"] = momentum
        return found

    def own_state(self) -> dict[str, Tensor]:
        """What differs between groups beside weights and optimiser: how far in the round this group is."""
        return {"round": torch.tensor([float(self.steps), self.weight], dtype=torch.float64)}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from `state`; momenta that it lacks begin anew."""
        for i, b in enumerate(self.anchor.buffers):
            b.copy_(state[f"anchor/{i}"])
        for i, p in enumerate(self._outer.param_groups[0]["params"]):
            self._outer.state.pop(p, None)
            if f"momentum/{i}" in state:
                self._outer.state[p]["momentum_buffer"] = state[f"momentum/{i}"].clone()

    def restore_own(self, state: dict[str, Tensor]) -> None:
        """Go on within the round where this group was."""
        steps, self.weight = state["round"].tolist()
        self.steps = int(steps)
