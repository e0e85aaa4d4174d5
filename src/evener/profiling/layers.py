"""Seconds of each layer alone: its real inputs are caught in one forward pass, then it runs by itself.

The loss runs by itself too, on the model's real output, and counts as the last layer's: so a plan gives it to
the stage that has it. Over a large vocabulary it takes longer than many layers.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from evener.core.figures import Figure
from evener.core.profile import Timing
from evener.core.tracebacks import is_out_of_memory
from evener.core.words import counted, some
from evener.errors import EvenerError
from evener.profiling.chain import Piece
from evener.profiling.memory import give_back
from evener.profiling.steps import Subject
from evener.profiling.timing import Stopwatch, figure_of, is_steady

REPEATS = 5
LEAST_REPEATS = 2
NO_TIME_S = 1e-12
Calls = list[tuple[tuple, dict]]


def caught_inputs(
    subject: Subject, pieces: Sequence[Piece], size: int
) -> tuple[dict[str, Calls], torch.dtype | None]:
    """The arguments of every call of every layer in one forward pass, cut off from the graph.

    With them comes the precision in which autocast ran the layers, None without.
    """
    calls: dict[str, Calls] = {}
    kind = subject.device.type
    precisions: list[torch.dtype | None] = []

    def catch(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            cut = tree_map(_cut_off, (args, kwargs))
            calls.setdefault(name, []).append(cut)
            precisions.append(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)

        return hook

    with ExitStack() as stack:
        for piece in pieces:
            if piece.module is not None:
                handle = piece.module.register_forward_pre_hook(catch(piece.name), with_kwargs=True)
                stack.callback(handle.remove)
        subject.step_loss(subject.model, subject.batch(size))
    return calls, precisions[0] if precisions else None


def _cut_off(value: Any) -> Any:
    """A copy outside of the graph, which asks for a gradient where the original did."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


class LayerTimer:
    """Times the forward and backward of a layer, or of the loss, over all its calls at one size."""

    def __init__(
        self,
        run: Callable[..., Any],
        calls: Calls,
        watch: Stopwatch,
        signature: tuple,
        precision: torch.autocast | None = None,
        copies: bool = True,
    ) -> None:
        self._precision, self._copies = precision or nullcontext(), copies
        self._run, self._calls, self._watch, self._signature = run, calls, watch, signature
        self.forward_s: list[float] = []
        self.backward_s: list[float] = []

    @property
    def is_steady(self) -> bool:
        return is_steady(self.forward_s) and (not self.backward_s or is_steady(self.backward_s))

    def once(self, *, keep: bool) -> None:
        """Run forward and backward; `keep` is false for the run that warms up."""
        # Copies of the inputs are no leaves, so that layers that work in place may write to them.
        copies = self._calls
        if self._copies:
            copies = tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, self._calls)
        _settle(copies)

        def forward() -> list[Any]:
            with self._precision:
                return [self._run(*args, **kwargs) for args, kwargs in copies]

        outputs, forward_s = self._watch.timed("0F0", forward, self._signature)
        leaves = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
        backward_s = None
        if leaves:
            gradients = [torch.ones_like(t) for t in leaves]
            _settle(gradients)
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


def _settle(value: Any) -> None:
    """Wait until the tensors in `value` are there, so that making them counts for no layer."""
    devices = {t.device for t in tree_leaves(value) if isinstance(t, torch.Tensor)}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)


def time_layers(
    subject: Subject,
    pieces: Sequence[Piece],
    round_s: dict[int, float],
    more: Sequence[int],
    updates: dict[str, Figure],
    watch: Stopwatch,
    last: str,
) -> tuple[list[Timing], list[str]]:
    """(timings of each layer at as many sizes as the budget allows, sentences about what was cut).

    The smallest size comes first, then the largest, then those between; `round_s` has the seconds of one
    whole forward and backward by size. Then come the sizes `more`, at which only layers fit, not the model.
    The loss's seconds are those of the layer `last`.
    """
    timings: list[Timing] = []
    notes: list[str] = []
    cut: list[int] = []
    known = dict(round_s)
    for size in [*_by_importance(sorted(round_s)), *more]:
        near = max(known, default=size)
        repeats = REPEATS if timings else LEAST_REPEATS  # without one size there are no pipelines
        if (repeats + 2) * known.get(size, known.get(near, 0.0) * size / near) > watch.left_s:
            cut.append(size)
            continue
        try:
            rows = _time_size(subject, pieces, size, updates, watch, notes, last)
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            cut.append(size)  # its inputs beside the model's own bytes were too much
            e.__traceback__ = None
            give_back(subject.device)
            continue
        both = [f.value for row in rows for f in (row.forward_s, row.backward_s) if f]
        known.setdefault(size, sum(both))
        timings += rows
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
    last: str,
) -> list[Timing]:
    calls, dtype = caught_inputs(subject, pieces, size)
    precision = torch.autocast(subject.device.type, dtype=dtype) if dtype else None
    timers = {
        piece.name: LayerTimer(piece.module, calls[piece.name], watch, ("layer", piece.name, size), precision)
        for piece in pieces
        if piece.name in calls and piece.module is not None
    }
    for name in list(timers):
        try:
            timers[name].once(keep=False)
        except Exception as e:
            if is_out_of_memory(e) or isinstance(e, EvenerError):
                raise
            notes.append(f"layer {name!r} is not timed, it does not run alone: {type(e).__name__}: {e}")
            del timers[name]
    _repeat(list(timers.values()), watch)
    parts = {piece.name: [timers[piece.name]] if piece.name in timers else [] for piece in pieces}
    timers.clear()
    calls.clear()  # the loss needs the room that their inputs took
    loss = _timed_loss(subject, size, watch, notes)
    if loss is not None and parts[last]:
        parts[last].append(loss)
    return [
        Timing(
            layer=name,
            kind=subject.kind,
            micro_batch=size,
            forward_s=_figure(_added([t.forward_s for t in part])),
            backward_s=_figure(_added([t.backward_s for t in part if t.backward_s])),
            update_s=updates.get(name),
        )
        for name, part in parts.items()
    ]


def _repeat(timers: Sequence[LayerTimer], watch: Stopwatch) -> None:
    """All of them in turn, until they are steady or time is up."""
    for number in range(REPEATS):
        if number >= LEAST_REPEATS and watch.left_s < 0:
            break
        for timer in timers:
            if not timer.is_steady:
                timer.once(keep=True)


def _timed_loss(subject: Subject, size: int, watch: Stopwatch, notes: list[str]) -> LayerTimer | None:
    """The loss alone, on what the model gives; None, with a note, where it cannot be timed so."""
    outputs: list[Any] = []
    batch = subject.batch(size)
    handle = subject.model.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        with torch.no_grad():
            subject.step_loss(subject.model, batch)
    finally:
        handle.remove()
    if len(outputs) != 1:
        notes.append(f"the loss is not timed: the model was called {counted(len(outputs), 'time')} for it")
        return None
    output = tree_map(_asking, outputs.pop())

    def loss(given: Any) -> torch.Tensor:
        return subject.step_loss(lambda *args, **kwargs: given, batch)  # type: ignore[arg-type]

    timer = LayerTimer(loss, [((output,), {})], watch, ("loss", size), copies=False)
    try:
        timer.once(keep=False)
        _repeat([timer], watch)
    except Exception as e:
        if isinstance(e, EvenerError):
            raise
        notes.append(f"the loss is not timed, it does not run alone: {type(e).__name__}")
        e.__traceback__ = None
        give_back(subject.device)
        return None
    return timer


def _asking(value: Any) -> Any:
    """A model's output as the loss gets it: it is asked for its gradient."""
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if is_float else value


def _added(rows: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of parts that run one after another, round by round. Example: (1, 2), (3, 4, 4): 4, 6."""
    return [sum(row) for row in zip(*rows, strict=False)]


def _figure(seconds: Sequence[float]) -> Figure | None:
    """`figure_of`, but what a device does in no time at all (a view) was measured all the same."""
    if seconds and not any(seconds):
        return Figure(value=NO_TIME_S, source="measured", note="no time at all")
    return figure_of(seconds)


@dataclass(frozen=True, kw_only=True)
class Updates:
    """What an optimiser over each layer's parameters alone took; `state_bytes` is its state in all layers."""

    seconds: dict[str, Figure]
    state_bytes: int
    notes: list[str]


def time_updates(subject: Subject, pieces: Sequence[Piece], watch: Stopwatch, *, alone: bool) -> Updates:
    """Seconds and bytes of an optimiser over each layer's parameters alone, and sentences about what was cut.

    Needs gradients (any), as a backward pass has left them; with `alone` there was none, because the whole
    model does not fit: then each layer gets gradients of zero while it is measured.
    """
    updates: dict[str, Figure] = {}
    states: dict[torch.Tensor, int] = {}
    notes: list[str] = []
    short: list[str] = []
    for place, piece in enumerate(pieces):
        given = [p for p in piece.params if alone and p.requires_grad and p.grad is None]
        for p in given:
            p.grad = torch.zeros_like(p)
        params = [p for p in piece.params if p.grad is not None]
        if not params:
            continue
        if watch.left_s < 0:
            rest = ", ".join(p.name for p in pieces[place:])
            notes.append(f"{subject.kind}: no time for the optimiser of layers {rest}")
            break
        try:
            optimizer = subject.optimizer(params)
            seconds = [_one_update(optimizer, watch, piece.name) for _ in range(2 + REPEATS)]
        except Exception as e:
            if isinstance(e, EvenerError):
                raise
            if is_out_of_memory(e):
                short.append(piece.name)
                e.__traceback__ = None  # its frames hold the state of the attempt
                give_back(subject.device)
                continue
            notes.append(f"the optimiser is not timed by layer: {type(e).__name__} at {piece.name!r}: {e}")
            break
        finally:
            for p in given:
                p.grad = None
        for held, state in optimizer.state.items():
            states[held] = sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor))
        figure = figure_of(seconds[2:])  # the first makes the state, the second is the first to find it
        if figure:
            updates[piece.name] = figure
    if short:
        notes.append(f"{subject.kind}: the optimiser of {some(short, 8)} does not fit, and is not timed")
    told, said = _state_of_all(states, [p for piece in pieces for p in piece.params if p.requires_grad])
    return Updates(seconds=updates, state_bytes=told, notes=[*notes, *said])


def _state_of_all(
    states: Mapping[torch.Tensor, int], trained: Sequence[nn.Parameter]
) -> tuple[int, list[str]]:
    """Bytes of state of all `trained`, in the proportion of those measured, and a sentence where that is so.

    Example: 8 bytes beside one parameter of 4, which is half of all: 16.
    """
    held, whole = sum(p.nbytes for p in states), sum(p.nbytes for p in dict.fromkeys(trained))
    found = sum(states.values())
    if not 0 < held < whole:
        return found, []
    return round(found * whole / held), [
        f"the optimiser's state was measured beside {held / whole:.0%} of the parameters, and is as large "
        "beside the others"
    ]


def _one_update(optimizer: torch.optim.Optimizer, watch: Stopwatch, name: str) -> float:
    def work() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return watch.timed("STEP", work, ("layer", name))[1]
