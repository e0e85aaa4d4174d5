"""Trying sums over groups on a job's own links, before the plan says which way gradients go."""

import time
from collections.abc import Callable, Sequence
from statistics import quantiles

import torch
from msgspec.structs import replace

from evener.core.exchange import exchange_of
from evener.core.fleet import Fleet
from evener.core.seams import Wire
from evener.policy.trials import Trials, tried
from evener.runtime.wires.open import NewGroup, open_grouped


def with_tried_sums(
    fleet: Fleet,
    trials: Trials,
    here: str,
    ring: Wire,
    new_group: NewGroup,
    around: Callable[..., Wire],
    device: torch.device,
) -> Fleet:
    """The fleet with what came of `trials`, the same on every process; called by all devices together.

    `ring` sums over all of them, `around(grouped)` is a wire over groups as `device` uses it.
    """
    names = tuple(d.name for d in fleet.devices)
    exchanges = [exchange_of(reductions, names) for reductions in trials.ways]
    over = {i: e.in_host_memory for i, e in enumerate(exchanges) if e is not None}
    grouped = {i: open_grouped(e, here, 0, new_group) for i, e in over.items()}
    wires = [around(grouped[i]) if i in grouped else ring for i in range(len(exchanges))]
    try:
        seconds = timed_sums(trials, wires, ring, names.index(here), len(names), device)
    finally:
        for wire in grouped.values():
            wire.close()
    return replace(fleet, sums=tried(trials, names, seconds))


def timed_sums(
    trials: Trials, wires: Sequence[Wire], ring: Wire, place: int, count: int, device: torch.device
) -> list[list[float]]:
    """By way and size the lower quartile of seconds until the last of `count` devices has the sum.

    In turn, so that what disturbs disturbs all alike: other work only adds to seconds.
    """
    taken = torch.zeros(count, 1 + trials.repeats, len(wires), len(trials.sizes), dtype=torch.float64)
    for turn in taken[place]:
        for row, wire in zip(turn, wires, strict=True):
            for i, size in enumerate(trials.sizes):
                buffer = torch.zeros(size // 4, device=device)
                ring.all_reduce(torch.zeros(1, device=device), "trial: all begin").wait()
                start = time.perf_counter()
                wire.all_reduce(buffer, f"trial, bucket {i}").wait()
                buffer[:1].tolist()  # on an accelerator waiting only queues: reading waits for the device
                row[i] = time.perf_counter() - start
    ring.all_reduce(taken, "trial: seconds").wait()
    last = taken.amax(0)[1:]  # the first turn opens connections and makes room
    return [[_quick(last[:, w, i].tolist()) for i in range(len(trials.sizes))] for w in range(len(wires))]


def _quick(seconds: Sequence[float]) -> float:
    return quantiles(seconds, n=4, method="inclusive")[0] if len(seconds) > 1 else seconds[0]
