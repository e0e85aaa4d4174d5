"""One stage of the plan on this device: what it keeps of a micro-batch between forward and backward.

    whole model     batch ──► loss                                   nothing comes in, nothing goes out
    first stage     batch ──► carry ──► carry                        carry: the tensors that cross the cut
    middle stage    carry ──► carry
    last stage      carry ──► output, with the batch's target ──► loss

An empty carry stands for a micro-batch that does not count (no weight, or a device ran out of memory): it
travels on as it is, so that nobody waits for what will not come.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from evener.runtime.batchnorm import keeping_statistics
from evener.runtime.problem import Problem, to_device
from evener.runtime.residing.residing import Residing
from evener.runtime.scope import Scope
from evener.runtime.split import SplitBackward
from evener.runtime.tables.layer import noted_lookups

Carry = tuple[torch.Tensor, ...]


class Slot(Protocol):
    """What a cut knows of one tensor that crosses it: the dimension that grows with the samples, if any."""

    @property
    def sample_dim(self) -> int | None: ...

    @property
    def per_sample(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype | None: ...


class Ends(Protocol):
    """How the user's arguments become the first carry, and the last carry the user's output."""

    def flatten(self, args: tuple, kwargs: dict) -> Carry: ...

    def unflatten_output(self, carry: Carry) -> Any: ...


@dataclass
class Alive:
    """One micro-batch between its forward and its backward."""

    pieces: list[Carry] = field(default_factory=list)
    outputs: Carry = ()
    loss: torch.Tensor | None = None
    scale: float = 1.0
    weight: float = 0.0
    shapes: tuple = ()
    split: SplitBackward | None = None
    scope: Scope = field(default_factory=Scope)
    lookups: list[torch.Tensor] = field(default_factory=list)  # rows of tables, which have gradients too

    @property
    def only_in_wave(self) -> bool:
        """Whether its samples have no weight and so no loss, but count in the statistics of their wave."""
        return self.scope.wave is not None and not self.weight


@dataclass(frozen=True, kw_only=True)
class Part:
    """A stage's module with its ends; `ends` is None for a whole model, which needs no cut."""

    stage: int
    module: nn.Module
    problem: Problem
    device: torch.device
    is_first: bool = True
    is_last: bool = True
    ends: Ends | None = None
    autocast: torch.dtype | None = None
    recompute: bool = False
    residing: Residing | None = None

    @property
    def names(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers that this stage holds, under the user's names."""
        if self.ends is None:
            return dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        return self.module.named  # type: ignore[return-value]  # a stage of a cut knows the user's names

    @property
    def of_stage(self) -> str:
        """Words for errors; nothing for a whole model."""
        return "" if self.ends is None else f" of stage {self.stage}"

    @property
    def takes(self) -> Sequence[Slot]:
        """What comes in over the cut before this stage."""
        return getattr(self.module, "takes", ())

    @property
    def gives(self) -> Sequence[Slot]:
        """What goes out over the cut behind it."""
        return getattr(self.module, "gives", ())

    @property
    def reads_batch(self) -> bool:
        """Whether its micro-batches need data of their own: inputs first, targets last."""
        return self.is_first or self.is_last

    def forward(self, alive: Alive, batch: Any, carry: Carry) -> dict:
        """Run the micro-batch; outputs or loss are kept in `alive`. Returns the metrics of a last stage."""
        # What autocast remembers of weights would stay on the device when they go.
        caches = self.residing is None or self.residing.stay
        autocast = (
            torch.autocast(self.device.type, dtype=self.autocast, cache_enabled=caches)
            if self.autocast
            else nullcontext()
        )
        there = self.residing.forward() if self.residing else nullcontext()
        loss_of = _no_loss if alive.only_in_wave else self.problem.loss_of
        with alive.scope, autocast, there, noted_lookups(alive.lookups):
            if self.ends is None:
                args, kwargs, target = self.problem.inputs(to_device(batch, self.device))
                alive.loss, metrics = self._run(lambda: loss_of(self.module(*args, **kwargs), target))
                return metrics
            unflatten, target = self.ends.unflatten_output, None
            if self.reads_batch:  # of which the first stage needs what the model gets, the last the target
                args, kwargs, target = self.problem.inputs(batch)
                if self.is_first:
                    carry = self.ends.flatten(*to_device((args, kwargs), self.device))
                if self.is_last:
                    target = to_device(target, self.device)
            if not self.is_first:
                carry = _received(carry, self.takes, self.autocast)
            if not self.is_last:
                alive.outputs = self._run(self.module, carry)
                return {}
            alive.loss, metrics = self._run(lambda: loss_of(unflatten(self.module(carry)), target))
            return metrics

    def backward(self, alive: Alive, seed: float, gradients: Carry) -> list[Carry]:
        """Gradients of what came in, piece by piece, for the tensors that need one.

        `seed` is the gradient of a last stage's loss; `gradients` are those of what this stage gave out.
        """
        with alive.scope, self._backward():
            _run_backward(*_ends(alive, seed, gradients))
        return [tuple(_gradient(t) for t in piece if t.requires_grad) for piece in alive.pieces]

    def backward_input(self, alive: Alive, seed: float, gradients: Carry) -> list[Carry]:
        """The same as `backward` but for the parameters' gradients, which wait for `backward_weight`."""
        outputs, seeds = _ends(alive, seed, gradients)
        leaves = [t for piece in alive.pieces for t in piece if t.requires_grad]
        own = [p for p in self.module.parameters() if p.requires_grad]
        leaves_ = [self.residing.guest_of(p) for p in own] if self.residing else own
        trained = [*leaves_, *alive.lookups]
        alive.split = SplitBackward(outputs, leaves, trained, at_once=self.recompute)
        with alive.scope, self._backward():
            found = alive.split.of_inputs(seeds)
        for leaf, gradient in zip(leaves, found, strict=True):
            leaf.grad = gradient
        return [tuple(_gradient(t) for t in piece if t.requires_grad) for piece in alive.pieces]

    def backward_weight(self, alive: Alive) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The parameters' (and looked-up rows') part of the backward whose `backward_input` ran."""
        with alive.scope, self._backward():
            return alive.split.of_parameters() if alive.split else []

    def land(self) -> None:
        """Gradients that were handed on have arrived where they are summed."""
        if self.residing:
            self.residing.land()

    def exposed_s(self) -> float:
        """Seconds that the action just done waited for parameters on their way to the device."""
        return self.residing.flow.exposed_s() if self.residing else 0.0

    def _backward(self) -> AbstractContextManager[None]:
        return self.residing.backward() if self.residing else nullcontext()

    def _run(self, work: Callable[..., Any], *args: Any) -> Any:
        """`work(*args)`, which is done again before its backward where nothing is to be kept of it.

        The loss is part of that: over a large vocabulary it keeps more than the layers before it.
        """
        by_layer = self.residing is not None and self.residing.recompute
        if self.recompute and not by_layer and torch.is_grad_enabled():
            twice = lambda: (nullcontext(), keeping_statistics(self.module))  # noqa: E731
            return checkpoint(work, *args, use_reentrant=False, context_fn=twice)
        return work(*args)


def _no_loss(output: Any, target: Any) -> tuple[torch.Tensor, dict]:
    """Zero, whatever the output, with zero gradients: a mean over nothing would be NaN."""
    tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return torch.stack([t.sum() * 0.0 for t in tensors]).sum(), {}


def _ends(alive: Alive, seed: float, gradients: Carry) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Where a backward begins, and the gradients that it begins with."""
    if alive.loss is not None:
        return [alive.loss], [torch.full_like(alive.loss, seed)]
    return [t for t in alive.outputs if t.requires_grad], list(gradients)


def _run_backward(outputs: list[torch.Tensor], seeds: list[torch.Tensor]) -> None:
    """`torch.autograd.backward` without 15 µs of checks, which the engine makes once more."""
    torch.autograd.graph._engine_run_backward(
        tuple(outputs), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _received(carry: Carry, slots: Sequence[Slot], precision: torch.dtype | None) -> Carry:
    """What came in, in the model's own dtypes where its maker had another precision than this stage."""

    def own(tensor: torch.Tensor, wanted: torch.dtype | None) -> torch.Tensor:
        if wanted is None or not wanted.is_floating_point or tensor.dtype == precision:
            return tensor
        return tensor.to(wanted)

    return tuple(own(t, slot.dtype) for t, slot in zip(carry, slots, strict=True))


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def as_leaves(carry: Carry) -> Carry:
    """The carry as its next stage on this device gets it: the same values, a graph of their own."""
    return tuple(t.detach().requires_grad_(t.requires_grad) for t in carry)


def cut_samples(carry: Carry, slots: Sequence[Slot], sizes: tuple[int, ...]) -> list[Carry]:
    """The carry of Σ sizes samples as one for each size; tensors without a sample dimension go whole.

    Example: a (5, 7) tensor and a (3, 3) mask in sizes (2, 3): (2, 7) and the mask, (3, 7) and the mask.
    """
    if len(sizes) == 1 or not carry:
        return [carry] * len(sizes)
    columns = []
    for tensor, slot in zip(carry, slots, strict=True):
        if slot.sample_dim is None:
            columns.append([tensor] * len(sizes))
        else:
            columns.append(list(tensor.split([n * slot.per_sample for n in sizes], slot.sample_dim)))
    return [tuple(column[i] for column in columns) for i in range(len(sizes))]


def join_samples(
    pieces: list[Carry], slots: Sequence[Slot], rest: Callable[[list[torch.Tensor]], torch.Tensor]
) -> Carry:
    """The inverse of `cut_samples`; `rest` joins the copies of a tensor without a sample dimension."""
    if len(pieces) == 1 or not all(pieces):
        return pieces[0] if all(pieces) else ()
    columns = zip(*pieces, strict=True)
    return tuple(
        rest(list(column)) if slot.sample_dim is None else torch.cat(column, slot.sample_dim)
        for column, slot in zip(columns, slots, strict=True)
    )


def sum_of(copies: list[torch.Tensor]) -> torch.Tensor:
    """The sum of equal tensors: `rest` where gradients are joined."""
    return torch.stack(copies).sum(0)
