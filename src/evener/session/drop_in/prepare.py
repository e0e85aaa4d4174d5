"""`ev.prepare`: an existing training loop on unequal devices, its loss code unchanged.

    model, optimizer, loader = ev.prepare(model, optimizer, loader)
    for x, y in loader:                       # one turn = one micro-batch of this device
        loss = loss_fn(model(x), y)
        loss.backward()                       # the step's last one ends with the sum over all devices
        optimizer.step()                      # moves once per global batch, does nothing in between
        optimizer.zero_grad()

The loader's `batch_size` is the global batch, so no loss is divided by a number of turns. Between
micro-batches `.grad` is None, after the last backward it is the gradient one device would have:
clip_grad_norm_ and the like work as they stand.
"""

import atexit
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from evener.core.fleet import Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.split import apportion
from evener.core.tell import tell
from evener.core.words import counted
from evener.errors import PlanMismatchError, UsageError
from evener.runtime.ranks import Ranks
from evener.runtime.replicas import spread_state
from evener.session.ask import fleet_here
from evener.session.drop_in.asked import check_asked
from evener.session.drop_in.gates import gate_optimizer, gate_scaler, gate_scheduler, watch_for_scalers
from evener.session.drop_in.loader import ShareLoader
from evener.session.drop_in.steps import LoopSteps, Scale
from evener.session.launched import world_size_here
from evener.session.loop.feed import Samples
from evener.session.meeting import open_meeting
from evener.session.site import backend_of, open_site


class Prepared(NamedTuple):
    """What `prepare` gives back, in the order it took it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: ShareLoader


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    plan: Plan | None = None,
    batch_per_device: dict[str, int] | Sequence[int] | None = None,
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
    scheduler: a torch LR scheduler, whose step() is made to act once per global batch; scaler: a GradScaler,
    likewise. Raises UsageError for what cannot be shared out: loaders, plans, an optimiser of another model.
    """
    check_asked(model, optimizer, loader, micro_batch, batch_per_device, scheduler=scheduler, scaler=scaler)
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
    scale = Scale(reduction, weight)
    if scale.is_of_samples and meeting.rank == 0 and _is_split(plan):
        tell(
            "the loss of this loop is taken as a mean over samples; one with class weights or ignored labels "
            "needs weight="
        )
    steps = LoopSteps(model, ranks, site.wire(fleet, names, rehearse=False), scale)
    gate_optimizer(optimizer, steps)
    if scheduler is not None:
        gate_scheduler(scheduler, steps)
    if scaler is not None:
        gate_scaler(scaler, steps)
    else:
        watch_for_scalers(optimizer, steps)
    return Prepared(model, optimizer, ShareLoader(samples, plan, steps, site.torch_device, meeting, ranks))


def _samples_of(loader: DataLoader, seed: int) -> tuple[Samples, int]:
    if loader.batch_size is None or not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        raise UsageError(
            f"the loader draws its samples with {type(loader.sampler).__name__}, which cannot be shared out",
            remedy="DataLoader(dataset, batch_size=global batch, shuffle=True or False)",
        )
    drawn, size = loader.sampler, len(loader.dataset)  # type: ignore[arg-type]  # samplers have asked too
    if not size:
        raise UsageError(
            "the loader's dataset is empty", numbers="0 samples", remedy="check its path and filters"
        )
    if isinstance(drawn, RandomSampler) and (drawn.replacement or len(drawn) != size):
        raise UsageError(
            "the loader draws with replacement or a part of the dataset, so an epoch is not each sample once",
            numbers=f"{counted(len(drawn), 'draw')} from {counted(size, 'sample')}",
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


def _is_split(plan: Plan) -> bool:
    """Whether a global batch is taken in more than one piece."""
    return any(p.micro_batch < plan.global_batch for p in plan.pipelines)


def _split_plan(
    names: tuple[str, ...], global_batch: int, given: dict[str, int] | Sequence[int] | None, micro: int | None
) -> Plan:
    """A plan of one-stage pipelines with the split that was asked for, the even one without."""
    if given is None:
        given = list(apportion(global_batch, [1.0] * len(names)))
    if isinstance(given, list | tuple) and len(given) != len(names):
        raise UsageError(
            f"batch_per_device has {counted(len(given), 'number')} for {counted(len(names), 'device')}",
            numbers=f"devices: {', '.join(names)}",
            remedy="one number a process, in their order",
        )
    split = given if isinstance(given, dict) else dict(zip(names, given, strict=True))
    if sum(split.values()) != global_batch or set(split) != set(names) or min(split.values()) < 1:
        raise UsageError(
            f"batch_per_device {given} does not share out batch_size {global_batch}",
            numbers=f"sum {sum(split.values())}, devices {', '.join(names)}",
            remedy="one positive number a device, with the loader's batch_size as their sum; in such a loop "
            "no device idles: start as many processes as take part, or ev.train, where 0 leaves one out",
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
