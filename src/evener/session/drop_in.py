"""`ev.prepare`: an existing training loop on unequal devices, its loss code unchanged.

    model, optimizer, loader = ev.prepare(model, optimizer, loader)
    for x, y in loader:                       # one turn = one micro-batch of this device
        loss = loss_fn(model(x), y)
        loss.backward()                       # the step's last one ends with the sum over all devices
        optimizer.step()                      # moves once per global batch, does nothing in between
        optimizer.zero_grad()

The loader's `batch_size` is the global batch. Between micro-batches `.grad` is None, after the last backward
it is the gradient one device would have: clip_grad_norm_ and the like work as they stand.
"""

import atexit
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from evener.core.fleet import Fleet
from evener.core.order import global_batch_at
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.seams import Wire
from evener.core.split import apportion
from evener.core.tell import tell
from evener.errors import ModelError, PlanMismatchError, ReductionMismatchError, UsageError
from evener.runtime.agreement import Verdict, judge
from evener.runtime.buckets import GradientBuckets
from evener.runtime.checkpoints.manifest import Position
from evener.runtime.problem import to_device
from evener.runtime.ranks import Ranks
from evener.runtime.replicas import spread_state
from evener.runtime.tally import ABANDONED, HEALTHY, Tally
from evener.runtime.tally import Share as TallyShare
from evener.session.ask import fleet_here
from evener.session.feed import Feed, Samples
from evener.session.meeting import Meeting, open_meeting, world_size_here
from evener.session.playbook import Playbook
from evener.session.site import backend_of, open_site


class Prepared(NamedTuple):
    """What `prepare` gives back, in the order it took it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: "ShareLoader"


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    *,
    scheduler: Any = None,
    plan: Plan | None = None,
    batch_per_device: dict[str, int] | list[int] | None = None,
    micro_batch: int | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    weight: Callable[[Any], Any] | None = None,
    fleet: Fleet | None = None,
    seed: int = 0,
) -> Prepared:
    """The same three, made to train together with the other processes of a torchrun job.

    batch_per_device: samples of each global batch by device, a list in process order or a dict; without it
    and without a plan all get the same. micro_batch: samples of one turn of the loop. reduction: whether the
    loop's loss is a mean or a sum over its batch. weight(batch): what a mean divides by; default the samples.
    scheduler: a torch LR scheduler, made to move once per global batch. Raises UsageError for loaders and
    plans that cannot be shared out.
    """
    meeting = open_meeting()
    fleet = fleet or fleet_here(None, world_size_here() or 1)
    names = tuple(d.name for d in fleet.devices)
    samples, global_batch = _samples_of(loader, seed)
    plan = plan or _split_plan(names, global_batch, batch_per_device, micro_batch)
    if plan.global_batch != global_batch or not plan.is_data_parallel or set(plan.devices) != set(names):
        raise PlanMismatchError(
            "the plan is not for this loop",
            numbers=f"plan: batch {plan.global_batch} on {', '.join(plan.devices)}; here: batch_size "
            f"{global_batch} on {', '.join(names)}",
            remedy="a plan of one-stage pipelines for these devices, and batch_size = global batch",
        )
    if any(s.precision or s.recompute or s.residence for _, _, s in plan.numbered_stages()):
        raise UsageError(
            "the plan asks for a precision, recompute or a residence, which a loop of one's own must see to",
            remedy="ev.train with this plan, or a plan without them",
        )
    site = open_site(fleet.devices[meeting.rank], rehearse=False)
    ranks = Ranks(names, site.device.name)
    model.to(site.torch_device)
    if ranks.world_size > 1:
        meeting.join_group(ranks.rank, ranks.world_size, backend_of(fleet, names))
        atexit.register(meeting.leave_group)  # its threads must end before the interpreter does
        spread_state(model)
    scale = _Scale(reduction, weight)
    steps = _LoopSteps(model, ranks, site.wire(fleet, names, rehearse=False), scale)
    _gate(optimizer, steps)
    if scheduler is not None:
        _gate_scheduler(scheduler, steps)
    return Prepared(model, optimizer, ShareLoader(samples, plan, steps, site.torch_device, meeting, ranks))


class ShareLoader:
    """Iterates over one epoch of this device's micro-batches; counts samples seen over all epochs."""

    def __init__(
        self,
        samples: Samples,
        plan: Plan,
        steps: "_LoopSteps",
        device: torch.device,
        meeting: Meeting,
        ranks: Ranks,
    ) -> None:
        self.plan, self.samples_seen, self.steps_taken = plan, 0, 0
        self.device, self.meeting, self.ranks = device, meeting, ranks
        self._samples, self._steps = samples, steps
        self._in_hand = 0  # samples of the global batch that the loop is at
        self._playbook = Playbook(plan, steps.here)

    def __len__(self) -> int:
        """Micro-batches of this device in an epoch."""
        return sum(len(sizes) for _, sizes in self._epoch(0))

    def __iter__(self) -> Iterator[Any]:
        pin = self.device.type != "cpu"
        feed = Feed(
            self._samples,
            self.plan.global_batch,
            self._playbook.reads,
            samples_seen=self.samples_seen,
            pin=pin,
        )
        for total, sizes in self._epoch(self.samples_seen):
            self._in_hand = total
            try:
                for number, size in enumerate(sizes):
                    batch = feed.next_batch() if size else self._samples.collate([self._samples.dataset[0]])
                    self._steps.begin(batch, size, total, last=number >= len(sizes) - 1)
                    yield to_device(batch, self.device)
            except GeneratorExit:  # the loop was left by a break
                self._count(total if self._steps.leave() else 0)
                raise
            self._steps.settle()
            self._count(total)
        feed.close()

    @property
    def position(self) -> Position:
        """Where in its data the loop is; UsageError between a global batch's first turn and its step."""
        if self._in_hand and not self._steps.is_done:
            raise UsageError(
                f"the loop on {self.ranks.here} is in the middle of a global batch",
                remedy="save after the optimizer.step() that moves: loader.at_boundary is then true",
            )
        return Position(
            step=self.steps_taken + bool(self._in_hand),
            samples_seen=self.samples_seen + self._in_hand,
            seed=self._samples.seed,
            global_batch=self.plan.global_batch,
            dataset_size=len(self._samples.dataset),
            shuffle=self._samples.shuffle,
        )

    @property
    def at_boundary(self) -> bool:
        """Whether the global batch at hand has been taken in full: the time to save or to evaluate."""
        return not self._in_hand or self._steps.is_done

    def go_on_from(self, position: Position) -> None:
        """The next loop begins where `position` is."""
        self.samples_seen, self.steps_taken = position.samples_seen, position.step

    def _count(self, samples: int) -> None:
        self.samples_seen += samples
        self.steps_taken += bool(samples)
        self._in_hand = 0

    def _epoch(self, seen: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(samples of the global batch, sizes of this device's micro-batches) up to the epoch's end."""
        size = self._samples.epoch_size(self.plan.global_batch)
        epoch = seen // size
        while seen // size == epoch:
            batch = global_batch_at(seen, size, self.plan.global_batch)
            # A device without samples in a small last batch has one turn with a stand-in that does not count.
            yield batch.samples, tuple(b - a for a, b in self._playbook.reads(batch)) or (0,)
            seen += batch.samples


@dataclass(frozen=True)
class _Scale:
    """How much the gradients of a turn count. A sum counts as it is; a mean by its part of all weight."""

    reduction: Literal["mean", "sum"]
    weight: Callable[[Any], Any] | None

    @property
    def divides_at_the_end(self) -> bool:
        """Whether all weight together is known only when the devices have told theirs."""
        return self.reduction == "mean" and self.weight is not None

    def of(self, batch: Any, size: int, total: int) -> tuple[float, float]:
        """(weight, factor) of a turn over `size` of the global batch's `total` samples."""
        weight = float(self.weight(batch) if self.weight and size else size)
        if self.reduction == "sum":
            return weight, 1.0 if weight else 0.0
        return weight, weight if self.weight else weight / total


class _LoopSteps:
    """Follows a loop that it does not drive: which backward is the last, and whether a step was finished."""

    def __init__(self, model: nn.Module, ranks: Ranks, wire: Wire, scale: "_Scale") -> None:
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
        self._in_turns = False  # whether some global batch took several turns of the loop

    def begin(self, batch: Any, size: int, total: int, *, last: bool) -> None:
        """A micro-batch of `size` samples of a global batch of `total` is about to be handed to the loop."""
        self.settle_micro_batch()
        self.verdict, self.moved, self._last = None, False, last
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
            raise UsageError(
                f"the loop on {self.here} went on without optimizer.step() after a global batch",
                numbers=f"step {self._number - 1}",
                remedy="call optimizer.step() in every turn; to accumulate, use a larger batch_size",
            )

    def leave(self) -> bool:
        """The loop is left in the middle; True if the global batch is done, else it comes again whole."""
        if self.verdict is not None:
            return True
        self._buckets.discard()
        self._share, self._awaited = TallyShare(), False
        return False

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


def _gate(optimizer: torch.optim.Optimizer, steps: _LoopSteps) -> None:
    move = optimizer.step

    @functools.wraps(move)  # with its attributes: LR schedulers look for a mark of theirs
    def step(closure: Any = None) -> Any:
        if closure is not None:
            raise UsageError(
                "an optimiser with a closure runs the model by itself and cannot be shared out",
                remedy="an optimiser whose step() takes no closure",
            )
        return move() if steps.may_move() else None

    optimizer.step = step  # type: ignore[method-assign]


def _gate_scheduler(scheduler: Any, steps: _LoopSteps) -> None:
    move, seen = scheduler.step, steps.num_moves

    def step(*args: Any, **kwargs: Any) -> None:
        nonlocal seen
        if steps.num_moves > seen:  # called every turn or once an epoch: either way only after a move
            seen = steps.num_moves
            move(*args, **kwargs)

    scheduler.step = step


def _samples_of(loader: DataLoader, seed: int) -> tuple[Samples, int]:
    if loader.batch_size is None or not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        raise UsageError(
            f"the loader draws its samples with {type(loader.sampler).__name__}, which cannot be shared out",
            remedy="DataLoader(dataset, batch_size=global batch, shuffle=True or False)",
        )
    drawn, size = loader.sampler, len(loader.dataset)  # type: ignore[arg-type]  # samplers have asked too
    if isinstance(drawn, RandomSampler) and (drawn.replacement or len(drawn) != size):
        raise UsageError(
            "the loader draws with replacement or a part of the dataset, so an epoch is not each sample once",
            numbers=f"{len(drawn)} draws from {size} samples",
            remedy="DataLoader(dataset, batch_size=global batch, shuffle=True)",
        )
    samples = Samples(
        dataset=loader.dataset,
        collate=loader.collate_fn,
        workers=loader.num_workers,
        shuffle=isinstance(loader.sampler, RandomSampler),
        seed=seed,
        drop_last=loader.drop_last,
        worker_init_fn=loader.worker_init_fn,
    )
    return samples, loader.batch_size


def _split_plan(
    names: tuple[str, ...], global_batch: int, given: dict[str, int] | list[int] | None, micro: int | None
) -> Plan:
    """A plan of one-stage pipelines with the split that was asked for, the even one without."""
    if given is None:
        given = list(apportion(global_batch, [1.0] * len(names)))
    if isinstance(given, list) and len(given) != len(names):
        raise UsageError(
            f"batch_per_device has {len(given)} numbers for {len(names)} devices",
            numbers=f"devices: {', '.join(names)}",
            remedy="one number a process, in their order",
        )
    split = given if isinstance(given, dict) else dict(zip(names, given, strict=True))
    if sum(split.values()) != global_batch or set(split) != set(names) or min(split.values()) < 1:
        raise UsageError(
            f"batch_per_device {given} does not share out batch_size {global_batch}",
            numbers=f"sum {sum(split.values())}, devices {', '.join(names)}",
            remedy="one positive number a device, with the loader's batch_size as their sum",
        )
    return Plan(
        global_batch=global_batch,
        pipelines=tuple(
            Pipeline(
                samples=n,
                micro_batch=min(micro or n, n),
                stages=(Stage(layers=("model",), shares=(Share(devices=(d,), samples=min(micro or n, n)),)),),
            )
            for d, n in split.items()
        ),
        why="the split that was asked for",
    )
