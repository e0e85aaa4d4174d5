"""`profile_model`: from an unmodified module to a Profile of one kind of device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from evener.core.layers import run_order
from evener.core.profile import Layer, Profile
from evener.core.seams import Driver
from evener.core.tracebacks import is_out_of_memory
from evener.errors import ModelError, UsageError
from evener.profiling.anatomy import OUTSIDE, Anatomy, anatomy
from evener.profiling.chain import Piece, chain_of, ties
from evener.profiling.layers import time_layers, time_updates
from evener.profiling.memory import give_back, state_bytes
from evener.profiling.peaks import counts_memory, layer_peaks, line_through, update_bytes, work_bytes
from evener.profiling.steps import Beside, StepTimer, Subject, time_steps
from evener.profiling.timing import Stopwatch
from evener.profiling.unchanged import left_unchanged

STEPS_PART = 0.6
"""The part of the budget for whole steps; layers one by one get the rest."""


def profile_model(
    *,
    model: nn.Module,
    step_loss: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    batch_of: Callable[[int], Any],
    kind: str,
    driver: Driver,
    device: torch.device | str = "cpu",
    micro_batches: Sequence[int],
    memory_bytes: int | None = None,
    budget_s: float = 60.0,
    name: str | None = None,
    beside: Beside | None = None,
) -> Profile:
    """Seconds and bytes of `model`, of each of its layers and of its whole step, on one `kind` of device.

    `step_loss(model, batch)` is the forward pass with the loss, `batch_of(n)` a batch of n real samples,
    `optimizer(params)` a torch optimiser. `model` is on `device` and is left bit for bit as it was. All
    work is timed by `driver`, as INPUT, 0F0, 0B0 and STEP, at the sizes `micro_batches` (samples). A
    size that does not fit in `memory_bytes`, or in the device's memory, is a result. `beside` is what a run
    does beside these actions. About `budget_s` seconds of the driver's clock are used; the profile's note
    says what they were too short for.

    Raises ModelError naming the layer in which the model raised. Example: a Linear(1024, 1024) has 4,198,400
    parameter bytes, 4,096 output bytes and 2,097,152 forward FLOPs a sample.
    A device that cannot hold a step of the whole model still has its layers measured, one at a time, at sizes
    at which each of them fits: what a plan of several stages needs.
    """
    device = torch.device(device)
    sizes = _sizes(micro_batches)
    pieces = chain_of(model)
    subject = Subject(
        model=model,
        step_loss=step_loss,
        batch_of=batch_of,
        optimizer=optimizer,
        device=device,
        kind=kind,
        beside=beside,
    )
    watch = Stopwatch(driver, budget_s)
    with left_unchanged(model, device) as changed:
        scans, unusable, notes = _scan(subject, pieces, sizes)
        timer = StepTimer(subject, watch)
        steps, round_s, said = time_steps(
            timer,
            [s for s in sizes if s not in unusable],
            held_bytes=_held_bytes(pieces, scans, timer.optimizer),
            memory_bytes=memory_bytes,
            reserve_s=(1 - STEPS_PART) * budget_s,
        )
        notes += said
        updates = time_updates(subject, pieces, watch, alone=not round_s)
        notes += updates.notes
        risen = _risen(subject, pieces, scans, timer, round_s)
        more = [s.micro_batch for s in steps if not s.fits]
        if memory_bytes is not None:
            more = [size for size in more if _largest_layer_bytes(pieces, scans, size) <= memory_bytes]
        last = _order(pieces, scans)[-1]
        timings, said = time_layers(subject, pieces, round_s, more, updates.seconds, watch, last)
        notes += said
        moving = changed()
    trainable = [p for p in model.parameters() if p.requires_grad]
    return Profile(
        model=name or type(model).__name__,
        layers=_layers(pieces, scans, risen),
        timings=tuple(timings),
        steps=tuple(steps),
        gradient_bytes=sum(p.nbytes for p in trainable),
        state_bytes=state_bytes(timer.optimizer) or updates.state_bytes,
        update_bytes=risen.update if risen else None,
        input_bytes_per_sample=risen.input if risen else 0,
        moving_buffers=moving,
        dtype=str(trainable[0].dtype).removeprefix("torch.") if trainable else "float32",
        note="; ".join(dict.fromkeys(notes)),
    )


def _sizes(micro_batches: Sequence[int]) -> list[int]:
    sizes = sorted(set(micro_batches))
    if not sizes or sizes[0] < 1:
        raise UsageError(
            f"micro-batch sizes must be 1 or more, got {', '.join(map(str, sizes)) or 'none'}",
            remedy="micro_batches=(1, 2, 4)",
        )
    return sizes


def _scan(
    subject: Subject, pieces: Sequence[Piece], sizes: Sequence[int]
) -> tuple[list[Anatomy], list[int], list[str]]:
    """Anatomies at the two smallest sizes that work, the sizes that do not, and sentences about those.

    A model may refuse the smallest sizes (BatchNorm has no variance over one value); it is an error when it
    refuses two.
    """
    scans: list[Anatomy] = []
    unusable: list[int] = []
    notes: list[str] = []
    for size in sizes:
        try:
            batch = subject.batch(size)
            scans.append(anatomy(subject.model, pieces, subject.step_loss, batch, size))
        except ModelError as e:
            if scans or unusable or len(sizes) == 1:
                raise
            unusable.append(size)
            notes.append(f"size {size} left out: {e.what}")
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            e.__traceback__ = None
            give_back(subject.device)
            break  # the climb will find the same and record it
        if len(scans) == 2:
            break
    return scans, unusable, notes


@dataclass(frozen=True, kw_only=True)
class _Risen:
    """(fixed, per sample) bytes of each layer's work; bytes of an optimiser's step and a sample's input."""

    work: dict[str, tuple[int, int]]
    update: int
    input: int


def _risen(
    subject: Subject,
    pieces: Sequence[Piece],
    scans: Sequence[Anatomy],
    timer: StepTimer,
    round_s: dict[int, float],
) -> _Risen | None:
    """How far memory rises at the smallest and the largest size, where the device says so."""
    if not (round_s and scans and counts_memory(subject.device)):
        return None
    order = _order(pieces, scans)
    saved = _saved(pieces, scans)
    works = []
    for size in dict.fromkeys((min(round_s), max(round_s))):
        peaks, batch_bytes = layer_peaks(subject, pieces, size)
        held = {name: fixed + size * each for name, (fixed, each) in saved.items()}
        works.append((size, work_bytes(order, peaks, held.__getitem__)))
    few, many = works[0], works[-1]
    lines = {n: line_through((few[0], few[1][n]), (many[0], many[1][n])) for n in order}
    update = update_bytes(subject.device, timer.update)
    return _Risen(work=lines, update=update, input=round(batch_bytes / max(round_s)))


def _order(pieces: Sequence[Piece], scans: Sequence[Anatomy]) -> list[str]:
    """The layers in the order in which forward uses them, as a cut wants them; see `run_order`."""
    first_use = {name: place for place, name in enumerate(scans[0].order)} if scans else {}
    return list(run_order([p.name for p in pieces], first_use))


def _saved(pieces: Sequence[Piece], scans: Sequence[Anatomy]) -> dict[str, tuple[int, int]]:
    """(fixed, per sample) bytes that each layer keeps for backward; the loss's are the last layer's."""
    found = {}
    last = _order(pieces, scans)[-1]
    for piece in pieces:
        names = (piece.name, OUTSIDE) if piece.name == last else (piece.name,)
        held = [(s.micro_batch, sum(s.saved_bytes[n] for n in names)) for s in scans]
        found[piece.name] = line_through(held[0], held[-1]) if held else (0, 0)
    return found


def _layers(pieces: Sequence[Piece], scans: Sequence[Anatomy], risen: _Risen | None) -> tuple[Layer, ...]:
    """The layers in the order in which forward uses them; with all bytes where memory is counted."""
    tied = ties(tuple(pieces))
    saved = _saved(pieces, scans)

    def of(piece: Piece) -> Layer:
        fixed, each = saved[piece.name]
        work = risen.work[piece.name] if risen else (0, 0)
        if risen is None:
            fixed, each = 0, round(_per_sample(scans, lambda s: s.saved_bytes[piece.name]))
        return Layer(
            name=piece.name,
            num_params=sum(p.numel() for p in piece.params),
            param_bytes=piece.param_bytes,
            saved_bytes=fixed,
            work_bytes=work[0],
            work_bytes_per_sample=work[1],
            output_kept=scans[0].output_kept.get(piece.name, "") if risen else "",
            buffer_bytes=sum(b.nbytes for b in piece.buffers),
            output_bytes_per_sample=round(_per_sample(scans, lambda s: s.output_bytes.get(piece.name, 0))),
            saved_bytes_per_sample=each,
            flops_per_sample=_per_sample(scans, lambda s: s.flops[piece.name]),
            tied=tied[piece.name],
        )

    by_name = {p.name: p for p in pieces}
    return tuple(of(by_name[name]) for name in _order(pieces, scans))


def _per_sample(scans: Sequence[Anatomy], count: Callable[[Anatomy], float]) -> float:
    """The slope over two sizes, which leaves out what does not grow with samples; with one size the ratio."""
    if len(scans) < 2:
        return count(scans[0]) / scans[0].micro_batch if scans else 0.0
    low, high = scans
    return max(0.0, (count(high) - count(low)) / (high.micro_batch - low.micro_batch))


def _held_bytes(
    pieces: Sequence[Piece], scans: Sequence[Anatomy], optimizer: torch.optim.Optimizer
) -> Callable[[int], float]:
    """Predicts the bytes that a step holds at its peak, by micro-batch size.

    parameters + gradients + optimiser state (two per trainable parameter until there is one) + buffers
    + bytes kept for backward + the largest output, which its gradient meets in backward.
    """
    params = {id(p): p for piece in pieces for p in piece.params}.values()
    trainable = sum(p.nbytes for p in params if p.requires_grad)
    fixed = sum(p.nbytes for p in params) + trainable
    fixed += sum(b.nbytes for piece in pieces for b in piece.buffers)
    saved = _per_sample(scans, lambda s: sum(s.saved_bytes.values()))
    output = _per_sample(scans, lambda s: max(s.output_bytes.values(), default=0))

    def held(size: int) -> float:
        state = state_bytes(optimizer) or 2 * trainable
        return fixed + state + size * (saved + output)

    return held


def _largest_layer_bytes(pieces: Sequence[Piece], scans: Sequence[Anatomy], size: int) -> float:
    """Predicts what the largest layer holds alone: parameters, gradients, two moments, one micro-batch."""

    def held(name: str) -> float:
        saved = _per_sample(scans, lambda s: s.saved_bytes[name])
        return saved + 2 * _per_sample(scans, lambda s: s.output_bytes.get(name, 0))

    return max(4 * p.param_bytes + size * held(p.name) for p in pieces)
