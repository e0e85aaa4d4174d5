"""Hosts' CPUs that compute beside accelerators: their threads are those that nobody else needs."""

import re

from msgspec.structs import replace

from evener.core.fleet import Device
from evener.core.words import counted
from evener.planner.host_cpu import threads_left
from evener.session.layout.tables import table_names
from evener.session.recipe import Recipe
from evener.session.request import Request

_THREADS = re.compile(r" \(\d+ threads?\)")


def beside_accelerators(request: Request, recipe: Recipe) -> tuple[Request, tuple[str, ...]]:
    """The request with CPUs that leave accelerators, loaders and tables their threads, and why; the same in
    all processes.

    A CPU with fewer threads is of another kind; one that a profile was made without keeps what it has.
    Rehearsed ones are as their fleet says.
    """
    if request.rehearse:
        return request, ()
    devices, said = [], []
    for device in request.fleet.devices:
        beside = [d for d in request.fleet.devices if d.host == device.host and d.type != "cpu"]
        if device.type == "cpu" and beside and device.threads:
            found = threads_left(
                device.threads,
                accelerators=len(beside),
                loader_workers=recipe.workers,
                tables=bool(table_names(recipe)),
            )
            fewer = _with_threads(device, found.compute)
            if request.profile is None or fewer.kind in request.profile.kinds:
                said.append(f"{device.name} {found.why}")
                device = fewer
            else:
                unknown = f"the profile has no seconds of {fewer.kind}"
                said.append(f"{device.name} keeps {device.threads} threads: {unknown}")
        devices.append(device)
    if not said:
        return request, ()
    return replace(request, fleet=replace(request.fleet, devices=tuple(devices))), tuple(said)


def _with_threads(device: Device, threads: int) -> Device:
    """Example: 6 threads of "EPYC (8 threads)" are an "EPYC (6 threads)"."""
    if threads == device.threads:
        return device
    words = f" ({counted(threads, 'thread')})"
    return replace(device, threads=threads, kind=_THREADS.sub("", device.kind) + words)
