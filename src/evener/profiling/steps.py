"""Seconds of the whole model's step, as the executor runs it: INPUT, 0F0, 0B0, STEP.

warm up   sizes from small to large, until one does not fit or time is short
rounds    1 2 4 8 STEP | 1 2 4 8 STEP | ...     all sizes in turn, so that slow spells hit all alike
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from evener.core.profile import StepTiming
from evener.core.tracebacks import is_out_of_memory, last_line
from evener.core.words import counted
from evener.errors import DataError, EvenerError, ModelError
from evener.profiling.anatomy import check_loss
from evener.profiling.memory import (
    between,
    give_back,
    peak_since,
    room_on,
    start_peak,
)
from evener.profiling.timing import Stopwatch, figure_of, is_steady

LEAST_ROUNDS = 3
MOST_ROUNDS = 25
MOST_A_ROUND = 5


class Beside(Protocol):
    """What a run does beside a step's actions, done here as well so that it is measured."""

    def arrive(self, batch: Any) -> None:
        """Before a forward: rows of tables are there for it, as a run has sent them ahead."""
        ...

    def look(self, batch: Any) -> None:
        """A forward has been queued: those of the next, as many as `batch` looks up, are sent."""
        ...

    def depart(self) -> None:
        """After the last backward: gradients of rows are in host memory."""
        ...

    def read(self, loss: torch.Tensor) -> None:
        """What the host reads of the device, once a step."""
        ...


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured, in the caller's words; see `profile_model`."""

    model: nn.Module
    step_loss: Callable[[nn.Module, Any], torch.Tensor]
    batch_of: Callable[[int], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    device: torch.device
    kind: str
    beside: Beside | None = None

    def batch(self, size: int) -> Any:
        """A batch of `size` samples; DataError when it cannot be had."""
        try:
            return self.batch_of(size)
        except EvenerError:
            raise
        except Exception as e:
            raise DataError(
                f"reading a batch of {counted(size, 'sample')} failed: {type(e).__name__}: {e}",
                remedy="samples that can be read and collated in a plain loop",
            ) from e


@dataclass
class Samples:
    """Seconds of one micro-batch size, one entry a round."""

    input_s: list[float] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    rows_s: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)

    @property
    def last_s(self) -> float:
        return self.input_s[-1] + self.forward_s[-1] + self.backward_s[-1]

    @property
    def is_steady(self) -> bool:
        return is_steady(self.forward_s) and is_steady(self.backward_s)


class StepTimer:
    """Times whole steps of one subject; holds the optimiser that the measurement uses."""

    def __init__(self, subject: Subject, watch: Stopwatch) -> None:
        self.subject, self.watch = subject, watch
        self.optimizer = subject.optimizer(subject.model.parameters())
        self.update_s: list[float] = []

    def once(self, size: int, into: Samples) -> None:
        """One micro-batch of `size` samples, forward and backward; gradients add up as in a real step.

        Raises ModelError where the model raises; running out of memory is passed on as it is.
        """
        subject, beside = self.subject, self.subject.beside
        batch, input_s = self.watch.timed("INPUT", lambda: subject.batch(size))

        def forward() -> torch.Tensor:
            loss = subject.step_loss(subject.model, batch)
            if beside:
                beside.look(batch)
            return loss

        if beside:
            beside.arrive(batch)
        loss, forward_s = self._guarded("forward", size, forward)
        check_loss(loss)
        _, backward_s = self._guarded("backward", size, loss.backward)
        if beside:
            into.rows_s.append(self.watch.timed("ROWS", beside.depart)[1])
            into.read_s.append(self.watch.timed("READ", lambda: beside.read(loss.detach()))[1])
        into.input_s.append(input_s)
        into.forward_s.append(forward_s)
        into.backward_s.append(backward_s)

    def update(self) -> float:
        """Seconds of one optimiser step on gradients of zero, which keep the parameters where they are."""
        for p in self.subject.model.parameters():
            if p.grad is not None and not p.grad.is_sparse:
                p.grad.zero_()

        def work() -> None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)

        try:
            return self.watch.timed("STEP", work, ("update", self.subject.kind))[1]
        except Exception as e:
            if is_out_of_memory(e):
                self.optimizer.state.clear()  # half made, the next step would not find the rest
            if is_out_of_memory(e) or isinstance(e, EvenerError):
                raise
            raise ModelError(
                f"the optimiser failed: {last_line(e)}",
                remedy="an optimiser whose step() works after backward() in a plain loop",
            ) from e

    def _guarded(self, phase: str, size: int, work: Callable[[], Any]) -> tuple[Any, float]:
        action = "0F0" if phase == "forward" else "0B0"
        try:
            return self.watch.timed(action, work, ("step", size))
        except Exception as e:
            if is_out_of_memory(e) or isinstance(e, EvenerError):
                raise
            raise ModelError(
                f"the model failed in {phase}: {last_line(e)}",
                numbers=f"micro-batch of {counted(size, 'sample')}",
                remedy=f"a {phase} pass that works on a batch of that size in a plain loop",
            ) from e


def time_steps(
    timer: StepTimer,
    sizes: Sequence[int],
    *,
    held_bytes: Callable[[int], float],
    memory_bytes: int | None,
    reserve_s: float,
) -> tuple[list[StepTiming], dict[int, float], list[str]]:
    """(timings by size, seconds of one round by size, sentences about what was cut).

    `held_bytes(size)` predicts a step's bytes; a size predicted or found not to fit ends the climb.
    `reserve_s` seconds of the watch's budget are left for what comes after.
    """
    taken, peaks, refused, notes = _warm_up(timer, sizes, held_bytes, memory_bytes, reserve_s)
    if not taken:  # nor may the optimiser's state fit: what the attempts left is in the way of single layers
        timer.optimizer.zero_grad(set_to_none=True)
        give_back(timer.subject.device)
    samples = {size: Samples() for size in taken}
    for number in range(MOST_ROUNDS if samples else 0):
        running = [s for s in samples if not samples[s].is_steady]
        settled = not running and is_steady(timer.update_s)
        if settled or (number >= LEAST_ROUNDS and timer.watch.left_s < reserve_s):
            break
        longest_s = max((taken[s] for s in running), default=0.0)
        for size in running:
            # Short steps scatter most and cost least: they are taken more than once a round.
            for _ in range(_times_a_round(taken[size], longest_s)):
                timer.once(size, samples[size])
        timer.update_s.append(timer.update())
    steps = [
        StepTiming(
            kind=timer.subject.kind,
            micro_batch=size,
            forward_s=figure_of(s.forward_s),
            backward_s=figure_of(s.backward_s),
            update_s=figure_of(timer.update_s),
            input_s=figure_of(s.input_s),
            step_overhead_s=figure_of(s.read_s),
            rows_s=figure_of(s.rows_s),
            peak_bytes=peaks[size],
        )
        for size, s in samples.items()
    ]
    steps += [StepTiming(kind=timer.subject.kind, micro_batch=size, fits=False) for size in refused]
    return steps, {size: s.last_s for size, s in samples.items()}, notes


def _times_a_round(size_s: float, longest_s: float) -> int:
    """As often as fits in a quarter of the longest step, 1 to 5 times."""
    return max(1, min(MOST_A_ROUND, int(longest_s / 4 / size_s))) if size_s > 0 else 1


def _warm_up(timer, sizes, held_bytes, memory_bytes, reserve_s):
    """Climb the sizes once: (seconds by size, peaks by size, sizes that do not fit, sentences)."""
    taken: dict[int, float] = {}
    peaks: dict[int, Any] = {}
    notes: list[str] = []
    updating: Any = None  # the peak of the optimiser's own step, whatever the size
    device = timer.subject.device
    waiting, refused = list(sizes), list[int]()
    while waiting:
        size, *waiting = waiting
        if memory_bytes is not None and held_bytes(size) > memory_bytes:
            notes.append(
                f"no room for {counted(size, 'sample')}: about {held_bytes(size):.3g} of {memory_bytes:.3g} "
                "bytes needed"
            )
            return taken, peaks, [size, *waiting], notes
        if taken:
            last = max(taken)
            this_s = taken[last] * size / last
            if this_s + LEAST_ROUNDS * (this_s + sum(taken.values())) > timer.watch.left_s - reserve_s:
                rest = ", ".join(map(str, [size, *waiting]))
                notes.append(f"{timer.subject.kind}: no time for sizes {rest}, a larger budget has")
                return taken, peaks, refused, notes
        try:
            if not taken:  # gradients and optimiser state belong to every peak
                timer.once(size, Samples())
                timer.update()
                start_peak(device)
                timer.update()
                updating = peak_since(device, (0.0,))
            start_peak(device)
            sample = Samples()
            timer.once(size, sample)
            peaks[size] = max(updating, peak_since(device, (held_bytes(size),)), key=lambda f: f.value)
            taken[size] = sample.last_s
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            notes.append(f"no room for {counted(size, 'sample')}: {str(e).strip().splitlines()[0]}")
            e.__traceback__ = None  # its frames hold the tensors of the attempt
        else:
            waiting = waiting if not refused else []
            continue
        give_back(device)
        # The largest that fits lies between two sizes that were asked for: close to it, once or twice.
        waiting, refused = (
            (waiting, [size, *refused])
            if refused
            else (
                between({b: f.value for b, f in peaks.items()}, size, room_on(device)),
                [size, *waiting],
            )
        )
    return taken, peaks, refused, notes
