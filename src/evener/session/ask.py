"""From what a person says (files, names, numbers) to a Request.

No torch until the devices of this host are asked for: what is wrong whatever they are is told at once.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from evener.core.budgets import with_budgets
from evener.core.catalogue import check_known, read_fleet
from evener.core.faults import FaultScript
from evener.core.files import read
from evener.core.fleet import Device, Fleet, unlike_kinds
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.core.split import split_of
from evener.core.words import counted
from evener.errors import FileError, UsageError
from evener.session.launched import world_size_here
from evener.session.request import LATEST, Request, folder_at, new_run_dir, unless_unused

NO_FAULTS = FaultScript()
_NOBODY_YET = Fleet(devices=(Device(name="nobody/yet", kind="none"),))


def fleet_here(devices: str | None, world_size: int | None = None) -> Fleet:
    """The devices of this host that a job uses, one process each.

    `devices` names torch devices ("cuda:1,cuda:3", "cpu,cpu"); without it: all accelerators, or the CPU where
    there is none. `world_size` (under torchrun) takes the first so many; a host without accelerators
    then has so many CPU processes, which share its threads.
    """
    from evener.probing import devices_here, host_name

    present = devices_here(host_name())
    accelerators = [d for d in present if d.type != "cpu"]
    (cpu,) = (d for d in present if d.type == "cpu")
    if devices:
        chosen = [_named(word.strip(), present) for word in devices.split(",") if word.strip()]
    elif accelerators:
        chosen = accelerators if world_size is None else [*accelerators, cpu][:world_size]
    else:
        chosen = [cpu] * (world_size or 1)
    if world_size is not None and len(chosen) != world_size:
        raise UsageError(
            f"processes started: {world_size}, for {counted(len(chosen), 'device')}",
            numbers=f"devices: {', '.join(d.name for d in chosen)}",
            remedy=f"--nproc-per-node {len(chosen)}",
        )
    return Fleet(devices=_distinct(chosen)).with_hosts(present)


def _named(word: str, present: tuple[Device, ...]) -> Device:
    for device in present:
        torch_name = device.type if device.index is None else f"{device.type}:{device.index}"
        if word in (torch_name, device.name):
            return device
    names = ", ".join(d.type if d.index is None else f"{d.type}:{d.index}" for d in present)
    raise UsageError(f"this host has no device {word!r}", remedy=f"one of: {names}")


def _distinct(devices: list[Device]) -> tuple[Device, ...]:
    """A CPU named several times becomes so many devices with their part of the threads each."""
    result: list[Device] = []
    for device in devices:
        again = devices.count(device)
        if again == 1:
            result.append(device)
            continue
        if device.type != "cpu":
            raise UsageError(f"{device.name} is named {again} times", remedy="name each accelerator once")
        threads = max(1, (device.threads or 1) // again)
        kind = f"{device.kind.partition(' (')[0]} ({counted(threads, 'thread')})"
        result.append(replace(device, name=f"{device.name}{len(result)}", threads=threads, kind=kind))
    return tuple(result)


def fleet_of(fleet: Path | None, rehearse: Path | None, devices: str | None, world_size: int | None) -> Fleet:
    """The fleet of a run: of a file, cut down to the named devices, or what this host has.

    CPUs of a file's hosts that are not among the named devices are its `hosts`.
    """
    if fleet and rehearse:
        raise UsageError("--fleet and --rehearse exclude each other", remedy="give one of them")
    if devices is not None and not devices.replace(",", "").strip():
        raise UsageError(
            f"--devices {devices!r} names no device", remedy="cuda:1,cuda:3, or names of the fleet"
        )
    path = fleet or rehearse
    if path is None:
        return fleet_here(devices, world_size)
    whole = chosen = read_fleet(path)
    if devices:
        names = tuple(w.strip() for w in devices.split(",") if w.strip())
        chosen = chosen.only(names).with_hosts((*whole.hosts, *whole.devices))
    if rehearse:
        # A plain "CPU" without figures is this machine's own, which nothing paces.
        paced = [d for d in chosen.devices if d.launch_s is None and not d.kind.casefold().startswith("cpu")]
        check_known(paced)
    return alike_by_kind(chosen).as_rehearsed() if rehearse else chosen


def with_cpus(fleet: Fleet) -> Fleet:
    """The fleet with the CPUs of its hosts as devices that may take samples; UsageError where it has none."""
    if not fleet.hosts:
        raise UsageError(
            "--with-cpu offers the CPU beside accelerators, and there is no accelerator, or no CPU more",
            numbers=f"devices: {', '.join(d.name for d in fleet.devices)}",
            remedy="leave it out: a CPU alone, or one named in --devices, is used anyway",
        )
    return replace(fleet, devices=(*fleet.devices, *fleet.hosts), hosts=())


def alike_by_kind(fleet: Fleet) -> Fleet:
    """`fleet` as it is; UsageError where devices of one kind are to be paced by different numbers.

    A profile is kept by kind, so the second of them would get the first one's seconds. Devices that were
    measured may differ a little: that is scatter, and only what is rehearsed has to be the same.
    """
    unlike = unlike_kinds(fleet)
    if unlike:
        raise UsageError(
            "devices of one kind are rehearsed with different numbers, and each kind is measured once",
            numbers="; ".join(unlike),
            remedy="a kind of its own for each of them in the fleet file",
        )
    return fleet


def request_for(
    script: Path,
    *,
    fleet: Path | None,
    rehearse: Path | None,
    devices: str | None,
    batch: int | None,
    batch_per_device: str | None,
    plan: Path | None = None,
    profile: Path | None = None,
    run_dir: Path | None = None,
    seed: int | None = None,
    resume: str | None = None,
    parts: str | None = None,
    memory: Sequence[str] = (),
    with_cpu: bool = False,
    faults: FaultScript = NO_FAULTS,
    **wishes: Any,
) -> Request:
    """The request for a run of `script`; its run folder exists when this returns.

    It is a new one, unless the script's latest run is to go on. Without a seed it is that of the run that
    goes on, else 0. `memory` are budgets of devices, see `with_budgets`.
    """
    check_script(script)
    if resume not in (None, LATEST) and not Path(resume).is_dir():
        raise UsageError(
            f"no folder {resume} to go on from", remedy="a run's folder, a checkpoint's, or latest"
        )
    asked = Request(
        script=str(script.resolve()),
        fleet=_NOBODY_YET,
        rehearse=rehearse is not None,
        plan=read(plan, Plan) if plan else None,
        profile=read(profile, Profile) if profile else None,
        run_dir="",
        seed=seed or 0,
        resume=resume,
        **wishes,
    )
    chosen = fleet_of(fleet, rehearse, devices, world_size_here())
    chosen = with_cpus(chosen) if with_cpu else chosen
    chosen = with_budgets(chosen, memory)
    split = split_of(batch_per_device, chosen)
    asked = replace(
        asked,
        fleet=chosen,
        faults=faults,
        global_batch=batch or (sum(split.values()) if split else None),
        batch_per_device=split,
        parts=split_of(parts, chosen, "--parts"),
    )
    stamp = time.strftime("%Y%m%d-%H%M%S")
    if not resume:
        return replace(asked, run_dir=folder_at(run_dir) if run_dir else new_run_dir(script.stem, stamp))
    from evener.session.checkpoints.resume import latest_run, seed_of  # loads torch

    if resume == LATEST and not run_dir:
        run_dir = latest_run(script.stem)
    folder = folder_at(run_dir) if run_dir else new_run_dir(script.stem, stamp)
    with unless_unused(folder):
        if seed is None:
            seed = seed_of(resume, Path(folder)) or 0
        return replace(asked, run_dir=folder, seed=seed)


def check_script(script: Path) -> None:
    """FileError unless there is such a file."""
    if not script.is_file():
        raise FileError(f"no script {script}", remedy="the path of a Python file with a function recipe()")
