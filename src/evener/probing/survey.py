"""`probe`: from the hardware of this host to a fleet, every number measured."""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psutil

from evener.core.figures import Curve, Figure
from evener.core.fleet import Device, Fleet, Link
from evener.core.host import BUSY_LOAD
from evener.probing import links as link_tasks
from evener.probing.identity import devices_here, free_bytes, host_name, select, torch_device
from evener.probing.rates import (
    Measurement,
    bandwidth_measurement,
    launch_task,
    matrix_measurements,
)
from evener.probing.rounds import Clock, Progress, Task, covering, fit_curve, run_rounds

FULL_S = 14.0
QUICK_S = 3.0
SLOT_S = 0.03


def probe(
    *,
    host: str | None = None,
    devices: Sequence[str] | None = None,
    quick: bool = False,
    links: bool = True,
    clock: Clock = time.perf_counter,
    progress: Progress | None = None,
) -> Fleet:
    """Measure every device torch can use on this host (or those named by `devices`), and the host's links.

    Rates are FLOP/s by dtype, bandwidth is bytes/s, times are seconds. Each number is the median over
    rounds that are spread over the whole probing time, with a relative spread that covers a second probe on
    the same machine; `quick` makes do with fewer rounds (about 5 s instead of 17) and so with wider
    spreads. A dtype that is not usable is absent, and the fleet's note says why. Process links are measured
    with Gloo over loopback, between two processes of one thread; `progress` gets the part done (0 to 1) and
    what is being measured.

    Raises UnknownNameError for a device that is not here, EnvironmentBrokenError when no two processes can be
    made to talk. Example: a 2-core CPU gives flops["float32"] of 3.2e11, give or take 6 %.
    """
    busy = psutil.getloadavg()[0]  # before our own work counts
    host = host or host_name()
    found = devices_here(host)
    chosen = select(found, devices) if devices is not None else found
    with ExitStack() as stack:
        pair = stack.enter_context(link_tasks.Pair()) if links else None
        if pair:
            pair.wait_until_ready()  # before anything is timed: starting takes both cores
        slot_s = SLOT_S / 2 if quick else SLOT_S
        probes = [_DeviceProbe(device, clock=clock, slot_s=slot_s) for device in chosen]
        curves = {what: link_tasks.message_tasks(pair, what) for what in ("send", "reduce")} if pair else {}
        tasks = [t for p in probes for t in p.tasks] + [t for by in curves.values() for t in by.values()]
        samples = run_rounds(tasks, clock=clock, seconds=QUICK_S if quick else FULL_S, progress=progress)
    measured = [p.device_with(samples) for p in probes]
    host_links = [link for p in probes for link in p.links(host, samples)]
    if curves:
        host_links.insert(0, _host_link(host, curves, samples))
    notes = [note for p in probes for note in p.notes]
    if busy > BUSY_LOAD * (psutil.cpu_count() or 1):
        notes.append(f"{host}: busy with other work (load average {busy:.1f}), quiet it is faster")
    rounds = min(len(values) for values in samples.values())
    notes.append(f"medians of {rounds} rounds, in each the fastest call, and spreads cover a second probe")
    return Fleet(devices=tuple(measured), links=tuple(host_links), note="; ".join(notes))


@dataclass
class _DeviceProbe:
    """What is measured of one device, and how its samples become figures."""

    device: Device
    clock: Clock
    slot_s: float
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        target, local = torch_device(self.device), self.device.name.partition("/")[2]
        how: dict[str, Any] = {"clock": self.clock, "slot_s": self.slot_s}
        self.framework_bytes = psutil.Process(os.getpid()).memory_info().rss
        self.matrix, self.notes = matrix_measurements(target, local, **how)
        self.bandwidth = bandwidth_measurement(target, local, **how)
        self.launch = launch_task(target, local, **how)
        self.copies = link_tasks.copy_tasks(target, local, **how) if target.type != "cpu" else {}
        # memory is sampled like everything else, because others use it too
        self.free = Task(name=f"free memory {local}", sample=lambda: float(free_bytes(self.device)))

    @property
    def tasks(self) -> list[Task]:
        rates = [m.task for m in (*self.matrix.values(), self.bandwidth)]
        return [*rates, self.launch, self.free, *self.copies.values()]

    def device_with(self, samples: dict[str, list[float]]) -> Device:
        """The device with its measured figures."""
        free = covering(samples[self.free.name])
        figures = {
            "free_memory_bytes": free,
            "flops": {name: _rate(m, samples) for name, m in self.matrix.items()},
            "bytes_per_s": _rate(self.bandwidth, samples),
            "launch_s": covering(samples[self.launch.name]),
        }
        if self.device.type == "cpu":
            figures["framework_bytes"] = Figure(
                value=self.framework_bytes,
                source="measured",
                spread=0.2,
                note="resident memory of a process that has imported torch",
            )
        return msgspec.structs.replace(self.device, **figures)

    def links(self, host: str, samples: dict[str, list[float]]) -> list[Link]:
        """The path between the host's memory and the device."""
        if not self.copies:
            return []
        return [Link(a=host, b=self.device.name, curve=_curve(self.copies, samples))]


def _rate(measurement: Measurement, samples: dict[str, list[float]]) -> Figure:
    seconds = samples[measurement.task.name]
    return covering([measurement.work / s for s in seconds], note=measurement.note)


def _curve(tasks: dict[int, Task], samples: dict[str, list[float]]) -> Curve:
    return fit_curve({num_bytes: samples[task.name] for num_bytes, task in tasks.items()})


def _host_link(host: str, tasks: dict[str, dict[int, Task]], samples: dict[str, list[float]]) -> Link:
    """Loopback between processes: messages as they are, all-reduces as the ring rounds they amount to.

    An all-reduce of B bytes over two is 2 rounds of B/2 bytes, so a round of B/2 bytes takes half its
    seconds.
    """
    rounds = {b / 2: [s / 2 for s in samples[task.name]] for b, task in tasks["reduce"].items()}
    return Link(a=host, b=host, curve=_curve(tasks["send"], samples), reduce_curve=fit_curve(rounds))
