"""Steps of a loop that is not ours to drive: which backward is the last, and whether all accept the sum."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from evener.core.seams import Wire
from evener.core.tell import tell
from evener.core.words import counted
from evener.errors import ModelError, ReductionMismatchError, UsageError
from evener.runtime.agreement import Verdict, judge
from evener.runtime.buckets import GradientBuckets
from evener.runtime.problem import checked_weight
from evener.runtime.ranks import Ranks
from evener.runtime.tally import ABANDONED, HEALTHY, Tally
from evener.runtime.tally import Share as TallyShare


@dataclass(frozen=True)
class Scale:
    """How much the gradients of a turn count. A sum counts as it is; a mean by its part of all weight."""

    reduction: Literal["mean", "sum"]
    weight: Callable[[Any], Any] | None

    @property
    def is_of_samples(self) -> bool:
        """Whether a loss is taken as a mean over its samples, as nobody has said anything else."""
        return self.reduction == "mean" and self.weight is None

    @property
    def divides_at_the_end(self) -> bool:
        """Whether all weight together is known only when the devices have told theirs."""
        return self.reduction == "mean" and self.weight is not None

    def of(self, batch: Any, size: int, total: int) -> tuple[float, float]:
        """(weight, factor) of a turn over `size` of the global batch's `total` samples."""
        weight = checked_weight(self.weight(batch), size) if self.weight and size else float(size)
        if self.reduction == "sum":
            return weight, 1.0 if weight else 0.0
        return weight, weight if self.weight else weight / total


class LoopSteps:
    """Follows a loop that it does not drive: which backward is the last, and whether a step was finished."""

    def __init__(self, model: nn.Module, ranks: Ranks, wire: Wire, scale: Scale) -> None:
        self.here = ranks.here
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buckets = GradientBuckets([self._parameters], ranks, wire)
        self._tally, self._scale = Tally(ranks, wire), scale
        for p in self._parameters:
            p.register_post_accumulate_grad_hook(self._when_gradient_arrives)
        self._number = 0
        self._share = TallyShare()
        self._last = self._awaited = self._queued = False
        self.verdict: Verdict | None = None
        self.moved = False
        self.num_moves = 0
        self.turn = "no turn of the loop yet"  # which one it is, for messages
        self._in_turns = False  # whether some global batch took several turns of the loop
        self._unmoved = 0  # global batches whose sum was accepted and not used, since the last move

    def begin(self, batch: Any, size: int, total: int, *, last: bool) -> None:
        """A micro-batch of `size` samples of a global batch of `total` is about to be handed to the loop."""
        self.settle_micro_batch()
        self.verdict, self.moved, self._last = None, False, last
        self.turn = f"step {self._number}, a turn of {size} of its {counted(total, 'sample')}"
        self.turn += "; the gradients come with this device's last one" if not last else ""
        self._in_turns = self._in_turns or not last
        weight, factor = self._scale.of(batch, size, total)
        self._share.weight += weight
        self._buckets.begin(factor)
        if last:
            self._buckets.arm(self._number)
        self._awaited, self._queued = True, False

    def settle_micro_batch(self) -> None:
        """Note a micro-batch whose backward never ended: user code caught an error, or skipped it."""
        if self._awaited:
            self._share.health = ABANDONED
            self._awaited = False

    def settle(self) -> None:
        """The loop is through with a global batch: if its sum was never made, make it now, as a no."""
        self.settle_micro_batch()
        if self.verdict is None:
            self._sum()
            self._report_skip()
        elif self.verdict.do == "apply" and not self.moved and self._in_turns:
            raise self._without_step("a global batch", f"step {self._number - 1}")
        self._unmoved = 0 if self.moved else self._unmoved + self.accepts

    def end_epoch(self) -> None:
        """The loop is through with its data: UsageError where it has never called `optimizer.step()`."""
        if self._unmoved and not self.num_moves:
            raise self._without_step("every global batch", f"{self._unmoved} global batches")

    def leave(self) -> bool:
        """The loop is left in the middle; True if the global batch is done, else it comes again whole."""
        if self.verdict is not None:
            return True
        self._buckets.discard()
        self._share, self._awaited = TallyShare(), False
        return False

    @property
    def accepts(self) -> bool:
        """Whether the sum over all devices is there, accepted by all, and not yet used."""
        return self.verdict is not None and self.verdict.do == "apply" and not self.moved

    def passed_by(self) -> None:
        """The sum was looked at and the optimiser is not to move by it, on all devices alike."""
        self.moved = True

    @property
    def is_done(self) -> bool:
        """Whether the global batch at hand is through: its step was made, or dropped by all."""
        return self.verdict is not None and (self.moved or self.verdict.do != "apply")

    def may_move(self) -> bool:
        """Whether the optimiser moves now: once, after a sum that all devices accept."""
        if self.moved:
            raise UsageError(
                f"a second optimizer.step() on {self.here} in one turn of the loop",
                remedy="one backward and one step in each turn",
            )
        if self.verdict is None:
            return False
        self.moved = self.verdict.do == "apply"
        self.num_moves += self.moved
        if not self.moved:
            self._report_skip()
        return self.moved

    def _without_step(self, after: str, numbers: str) -> UsageError:
        return UsageError(
            f"the loop on {self.here} went on without optimizer.step() after {after}",
            numbers=numbers,
            remedy="call optimizer.step() in every turn; to accumulate, use a larger batch_size",
        )

    def _when_gradient_arrives(self, _: nn.Parameter) -> None:
        if self.verdict is not None and not self.moved:
            raise ModelError(
                f"a second backward on {self.here} after the sum over all devices was made",
                remedy="one backward in each turn of the loop: add the losses first, then loss.backward()",
            )
        if not self._queued and self.verdict is None:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._when_backward_ends)

    def _when_backward_ends(self) -> None:
        self._awaited = False
        if self._last:
            self._sum()

    def _sum(self) -> None:
        self._share.computed_s = float(self.num_moves)  # a slot that a loop of one's own has no use for
        self._buckets.launch_rest(self._number)
        underway = self._tally.launch(self._number, self._share)
        self._buckets.wait()
        totals = underway.wait()
        self._check_alike(totals.computed_s, "moved their optimiser a different number of times")
        self.verdict = judge(totals.health, on_non_finite="skip", weight=totals.weight)
        if self.verdict.do == "apply":
            self._buckets.finish(totals.weight if self._scale.divides_at_the_end else 1.0)
        else:
            self._buckets.discard()
        self._number += 1
        self._share = TallyShare(health=HEALTHY)

    def _check_alike(self, by_device: dict[str, float], what: str) -> None:
        if len(set(by_device.values())) > 1:
            raise ReductionMismatchError(
                f"the devices have {what}, so their parameters are no longer the same",
                numbers=", ".join(f"{device} {n:g}" for device, n in by_device.items()),
                remedy="the same loop on every device: optimizer.step() in every turn",
            )

    def _report_skip(self) -> None:
        assert self.verdict is not None
        if self.verdict.do != "apply":
            tell(f"step {self._number - 1} skipped by all: {self.verdict.reason}")
