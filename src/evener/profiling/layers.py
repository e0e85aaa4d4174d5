"""Seconds of each layer alone: its real inputs are caught in one forward pass, then it runs by itself."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from evener.core.figures import Figure
from evener.core.profile import Timing
from evener.errors import EvenerError
from evener.profiling.chain import Piece
from evener.profiling.memory import give_back, is_out_of_memory
from evener.profiling.steps import Subject
from evener.profiling.timing import Stopwatch, figure_of, is_steady

REPEATS = 5
LEAST_REPEATS = 2
Calls = list[tuple[tuple, dict]]


def caught_inputs(subject: Subject, pieces: Sequence[Piece], size: int) -> dict[str, Calls]:
    """The arguments of every call of every layer in one forward pass, cut off from the graph."""
    calls: dict[str, Calls] = {}

    def catch(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            cut = tree_map(_cut_off, (args, kwargs))
            calls.setdefault(name, []).append(cut)

        return hook

    with ExitStack() as stack:
        for piece in pieces:
            if piece.module is not None:
                handle = piece.module.register_forward_pre_hook(catch(piece.name), with_kwargs=True)
                stack.callback(handle.remove)
        subject.step_loss(subject.model, subject.batch(size))
    return calls


def _cut_off(value: Any) -> Any:
    """A copy outside of the graph, which asks for a gradient where the original did."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


class LayerTimer:
    """Times one layer's forward and backward over all its calls at one micro-batch size."""

    def __init__(self, piece: Piece, calls: Calls, watch: Stopwatch, signature: tuple) -> None:
        assert piece.module is not None, "only modules have calls"
        self._module, self._calls, self._watch, self._signature = piece.module, calls, watch, signature
        self.forward_s: list[float] = []
        self.backward_s: list[float] = []

    @property
    def is_steady(self) -> bool:
        return is_steady(self.forward_s) and (not self.backward_s or is_steady(self.backward_s))

    def once(self, *, keep: bool) -> None:
        """Run forward and backward; `keep` is false for the run that warms up."""
        # Copies of the inputs are no leaves, so that layers that work in place may write to them.
        copies = tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, self._calls)

        def forward() -> list[Any]:
            return [self._module(*args, **kwargs) for args, kwargs in copies]

        outputs, forward_s = self._watch.timed("0F0", forward, self._signature)
        leaves = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
        backward_s = None
        if leaves:
            gradients = [torch.ones_like(t) for t in leaves]
            _, backward_s = self._watch.timed(
                "0B0", lambda: torch.autograd.backward(leaves, gradients), self._signature
            )
        for leaf in tree_leaves(self._calls):
            if isinstance(leaf, torch.Tensor):
                leaf.grad = None
        if keep:
            self.forward_s.append(forward_s)
            if backward_s is not None:
                self.backward_s.append(backward_s)


def time_layers(
    subject: Subject,
    pieces: Sequence[Piece],
    round_s: dict[int, float],
    updates: dict[str, Figure],
    watch: Stopwatch,
) -> tuple[list[Timing], list[str]]:
    """(timings of each layer at as many sizes as the budget allows, sentences about what was cut).

    The smallest size comes first, then the largest, then those between; `round_s` has the seconds of one
    whole forward and backward by size.
    """
    timings: list[Timing] = []
    notes: list[str] = []
    cut: list[int] = []
    for size in _by_importance(sorted(round_s)):
        if (REPEATS + 2) * round_s[size] > watch.left_s:
            cut.append(size)
            continue
        try:
            timings += _time_size(subject, pieces, size, updates, watch, notes)
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            cut.append(size)  # its inputs beside the model's own bytes were too much
            e.__traceback__ = None
            give_back(subject.device)
    if cut:
        sizes = ", ".join(map(str, sorted(cut)))
        notes.append(f"{subject.kind}: layers not timed alone at sizes {sizes}, for want of time or memory")
    return sorted(timings, key=lambda t: t.micro_batch), notes


def _by_importance(sizes: list[int]) -> list[int]:
    """Smallest, largest, then from the upper middle down. Example: 1, 2, 4, 8 → 1, 8, 4, 2."""
    return sizes[:1] + sizes[:0:-1]


def _time_size(
    subject: Subject,
    pieces: Sequence[Piece],
    size: int,
    updates: dict[str, Figure],
    watch: Stopwatch,
    notes: list[str],
) -> list[Timing]:
    calls = caught_inputs(subject, pieces, size)
    timers = {
        piece.name: LayerTimer(piece, calls[piece.name], watch, ("layer", piece.name, size))
        for piece in pieces
        if piece.name in calls
    }
    for name in list(timers):
        try:
            timers[name].once(keep=False)
        except Exception as e:
            if is_out_of_memory(e) or isinstance(e, EvenerError):
                raise
            notes.append(f"layer {name!r} is not timed, it does not run alone: {type(e).__name__}: {e}")
            del timers[name]
    for number in range(REPEATS):
        if number >= LEAST_REPEATS and watch.left_s < 0:
            break
        for timer in timers.values():
            if not timer.is_steady:
                timer.once(keep=True)
    return [
        Timing(
            layer=piece.name,
            kind=subject.kind,
            micro_batch=size,
            forward_s=figure_of(timers[piece.name].forward_s) if piece.name in timers else None,
            backward_s=figure_of(timers[piece.name].backward_s) if piece.name in timers else None,
            update_s=updates.get(piece.name),
        )
        for piece in pieces
    ]


def time_updates(
    subject: Subject, pieces: Sequence[Piece], watch: Stopwatch
) -> tuple[dict[str, Figure], list[str]]:
    """Seconds of an optimiser over each layer's parameters alone, and sentences about what was cut.

    Needs gradients (any), as a backward pass has left them.
    """
    updates: dict[str, Figure] = {}
    for place, piece in enumerate(pieces):
        params = [p for p in piece.params if p.grad is not None]
        if not params:
            continue
        if watch.left_s < 0:
            rest = ", ".join(p.name for p in pieces[place:])
            return updates, [f"{subject.kind}: no time for the optimiser of layers {rest}"]
        try:
            optimizer = subject.optimizer(params)
            seconds = [_one_update(optimizer, watch, piece.name) for _ in range(2 + REPEATS)]
        except Exception as e:
            if isinstance(e, EvenerError):
                raise
            return updates, [
                f"the optimiser is not timed by layer: {type(e).__name__} at {piece.name!r}: {e}"
            ]
        figure = figure_of(seconds[2:])  # the first makes the state, the second is the first to find it
        if figure:
            updates[piece.name] = figure
    return updates, []


def _one_update(optimizer: torch.optim.Optimizer, watch: Stopwatch, name: str) -> float:
    def work() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return watch.timed("STEP", work, ("layer", name))[1]
