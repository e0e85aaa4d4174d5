"""Trying sums over groups on a job's own links, before the plan says which way gradients go."""

import time
from collections.abc import Callable, Sequence

import torch
from msgspec.structs import replace

from evener.core.exchange import exchange_of
from evener.core.fleet import Fleet
from evener.core.seams import Wire
from evener.policy.trials import Samples, Trials, again, tried
from evener.runtime.wires.open import NewGroup, open_grouped

OTHER_BYTES = 2**26


def with_tried_sums(
    fleet: Fleet,
    look: Trials,
    here: str,
    ring: Wire,
    new_group: NewGroup,
    around: Callable[..., Wire],
    device: torch.device,
) -> Fleet:
    """The fleet with what came of trials, the same on every process; called by all devices together.

    A first `look`, then the ways that were nearly the fastest again. `ring` sums over all devices,
    `around(grouped)` is a wire over groups as `device` uses it.
    """
    names = tuple(d.name for d in fleet.devices)
    exchanges = [exchange_of(reductions, names) for reductions in look.ways]
    grouped = {i: open_grouped(e, here, 0, new_group) for i, e in enumerate(exchanges) if e is not None}
    wires = [around(grouped[i]) if i in grouped else ring for i in range(len(exchanges))]
    place, count = names.index(here), len(names)
    try:
        first = timed_sums(look, wires, ring, place, count, device, warms=True)
        near = again(look, first)
        chosen = [wires[look.ways.index(way)] for way in near.ways]
        second = timed_sums(near, chosen, ring, place, count, device, warms=False)
    finally:
        for wire in grouped.values():
            wire.close()
    return replace(fleet, sums=tried(names, [(look, first), (near, second)]))


def timed_sums(
    trials: Trials,
    wires: Sequence[Wire],
    ring: Wire,
    place: int,
    count: int,
    device: torch.device,
    *,
    warms: bool,
) -> Samples:
    """By way, size and turn the seconds until the last of `count` devices has the sum.

    In turn, so that what disturbs disturbs all alike. `warms`: the turn before, which opens connections and
    makes room, does not count. Values are normal, as gradients nearly are: how far some lanes can pack them
    depends on it. Before each sum other memory is gone through, as a backward does, and where there are
    several ways none follows itself: it would find what it works with in the caches.
    """
    taken = torch.zeros(count, warms + trials.repeats, len(wires), len(trials.sizes), dtype=torch.float64)
    values = torch.randn(max(trials.sizes, default=0) // 4, generator=torch.Generator().manual_seed(place))
    given, buffer = values.to(device), torch.empty_like(values, device=device)
    other = torch.zeros(OTHER_BYTES if len(wires) else 0, dtype=torch.uint8)
    for turn in taken[place]:
        for i, size in enumerate(trials.sizes):
            for row, wire in zip(turn, wires, strict=True):
                other.add_(1)
                summed = buffer[: size // 4].copy_(given[: size // 4])
                ring.all_reduce(torch.zeros(1, device=device), "trial: all begin").wait()
                start = time.perf_counter()
                wire.all_reduce(summed, f"trial, bucket {i}").wait()
                summed[:1].tolist()  # on an accelerator waiting only queues: reading waits for the device
                row[i] = time.perf_counter() - start
    ring.all_reduce(taken, "trial: seconds").wait()
    last = taken.amax(0)[int(warms) :]
    return [[last[:, w, i].tolist() for i in range(len(trials.sizes))] for w in range(len(wires))]
