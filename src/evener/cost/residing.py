"""Seconds of a stage whose parameters, or whose optimiser, live on the host; see `core.plan.Stage`.

forward    c0 │ c1 │ c2 │          computing layer k, layer k+1 comes: max(c_k, x_(k+1)) each
in            x1 │ x2 │ x3
backward   b3 │ b2 │ b1 │ b0       the same with k-1; behind it gradients go (g) and are added on the host (a)
out             g3 │ g2 │ g1 │ g0
host               a3 │ a2 │ a1 │ a0
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from evener.core.figures import Curve
from evener.core.fleet import Disk
from evener.core.plan import Stage
from evener.core.residence import host_bytes_per_s, host_disk, host_room, run_whole, step_passes
from evener.core.words import counted
from evener.cost.model import CostModel
from evener.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class HostRoad:
    """Seconds between a device and its host, by layer: parameters in (`x`), gradients out (`g`) and added on
    the host (`a`); and the host's rate in bytes a second.
    """

    x: np.ndarray
    g: np.ndarray
    a: np.ndarray
    host_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Seconds of a stage with a residence on one device, for one micro-batch and once a step.

    `first_s` is what the step's first forward takes beyond `forward_s`: nothing is on the device yet.
    `exposed_s` is the part of a micro-batch that computing waits for copies, beside `first_s`, but not what
    it waits for the host to add gradients.
    """

    forward_s: float
    backward_s: float
    first_s: float
    update_s: float
    exposed_s: float


def road_of(model: CostModel, name: str) -> HostRoad:
    """The way between device `name` and its host. UsageError where the fleet names no link between them."""
    link, rate = model.fleet.host_link(name), host_bytes_per_s(model.fleet, name)
    if link is None or rate is None:
        raise UsageError(
            f"{name} keeps parameters or state on its host, and the fleet names no link between them",
            remedy=f"a link of {name} and its host in the fleet file, or no residence for its stages",
        )
    data = model.bytes
    whole = np.array(run_whole([x.name for x in model.profile.layers]))
    moved = np.where(whole, np.diff(data.parameters), 0.0)
    return HostRoad(
        x=_seconds(link.curve, moved),
        g=_seconds(link.curve, np.diff(data.gradients)),
        a=3 * np.diff(data.gradients) / rate.value,
        host_bytes_per_s=rate.value,
    )


def _seconds(curve: Curve, sizes: np.ndarray) -> np.ndarray:
    return np.array([curve.seconds(float(n)) if n else 0.0 for n in sizes])


class Ends(NamedTuple):
    """When a pass through layers would end with each of them, and how long it has waited for copies then."""

    ends_s: list[float]
    waits_s: list[float]


def forward_ends(c: Sequence[float], x: Sequence[float], there: Sequence[int]) -> Ends:
    """When each layer of a forward ends, of layers that take `c` to compute and `x` to come.

    `there` are those on the device at its begin. Layer k+1 is sent for when layer k begins. Example: three
    layers of c = 2, x = 3, the first two there: 2, 4, 7 after waits of 0, 0, 1; with none there 5, 8, 11.
    """
    ready = dict.fromkeys(there, 0.0)
    now = engine = waited = 0.0
    found = Ends([], [])

    def send_for(k: int, since: float) -> None:
        nonlocal engine
        if k not in ready:
            engine = ready[k] = max(since, engine) + x[k]

    for k in range(len(c)):
        send_for(k, now)
        waited += max(0.0, ready[k] - now)
        now = max(now, ready[k])
        if k + 1 < len(c):
            send_for(k + 1, now)
        now += c[k]
        found.ends_s.append(now)
        found.waits_s.append(waited)
    return found


def backward_ends(b: Sequence[float], x: Sequence[float], g: Sequence[float], a: Sequence[float]) -> Ends:
    """When a backward that goes down to each layer would end, gradients included, from the last layer on.

    Layers take `b` to compute, `x` to come, and their gradients `g` to leave and `a` to be added on the host.
    The last two are there. The host adds a layer's gradients before those of the next one leave. Example: b =
    2, x = 3, g = 3, a = 1 for three layers: they begin at 0, 2 and 6 (the host adds those of the first until
    then); the last gradients leave at 10, when those before are added, and are added themselves at 14. So it
    would end at 6, 10 or 14.
    """
    ready = dict.fromkeys(range(max(len(b) - 2, 0), len(b)), 0.0)
    now = engine = out = host = waited = 0.0
    landing: tuple[float, float] | None = None
    found = Ends([], [])
    for k in range(len(b) - 1, -1, -1):
        waited += max(0.0, ready[k] - max(now, host))
        begin = max(now, host, ready[k])
        came = engine
        if k - 1 >= 0 and k - 1 not in ready:
            engine = ready[k - 1] = max(begin, engine) + x[k - 1]
        now = begin + b[k]
        if g[k]:
            if landing is not None:
                host = max(host, landing[0]) + landing[1]
            out = max(now, out, host) + g[k]
            landing = out, a[k]
        last = max(host, landing[0]) + landing[1] if landing is not None else host
        found.ends_s.append(max(now, last, came))
        found.waits_s.append(waited + max(0.0, out - max(now, host)))
    return found


def resident(model: CostModel, stage: Stage, name: str, samples: int) -> Resident:
    """Seconds of `stage`, which has a residence, on device `name` for `samples` of a micro-batch.

        update = passes · bytes / host rate; with "host-optimizer" gradients out before it; with state on
                 disk it is read and written as well, state / read rate + state / write rate
        first  = a forward with nothing there - one with the first two there

    UsageError for a tensor-parallel group, without a link to the host, or without a disk that is wanted.
    Example: 8 GB of state on a disk of 2 and 1 GB/s: 4 + 8 = 12 s more.
    """
    first, last = model.span(stage)
    if any(len(s.devices) > 1 for s in stage.shares if name in s.devices):
        raise UsageError(
            f"{name} is in a tensor-parallel group, whose parts do not live on hosts",
            remedy="no residence for that stage, or one device",
        )
    told = _made(model, name, first, last, samples, str(stage.residence), stage.recompute)
    if not stage.state_on_disk:
        return told
    state = float(model.bytes.optimizer[last] - model.bytes.optimizer[first])
    return replace(told, update_s=told.update_s + disk_of(model, name).seconds(state, state))


def disk_of(model: CostModel, name: str) -> Disk:
    """The disk of the host of device `name`. UsageError where the fleet does not say it."""
    disk = host_disk(model.fleet, name)
    if disk is None:
        raise UsageError(
            f"{name} keeps its optimiser's state on its host's disk, of which the fleet says nothing",
            remedy="evener probe --disk FOLDER on that host, or disk with its CPU in the fleet file",
        )
    return disk


def _made(
    model: CostModel, name: str, first: int, last: int, samples: int, residence: str, again: bool
) -> Resident:
    road = road_of(model, name)
    forward, backward = model.layers(model.fleet.device(name).kind).seconds(samples)
    c, b = (list(map(float, s[first:last])) for s in (forward, backward))
    if again:
        b = [x + y for x, y in zip(b, c, strict=True)]
    x, g, a = (list(map(float, s[first:last])) for s in (road.x, road.g, road.a))
    data = model.bytes
    held, made, state = (float(s[last] - s[first]) for s in (data.parameters, data.gradients, data.optimizer))
    update = step_passes(state / held if held else 0.0) * held / road.host_bytes_per_s
    cold = forward_ends(c, x, ()).ends_s[-1]
    if residence == "host-optimizer":
        link = model.fleet.host_link(name)
        assert link is not None
        out = link.curve.seconds(made) if made else 0.0
        return Resident(
            forward_s=sum(c),
            backward_s=sum(b),
            first_s=cold - sum(c),
            update_s=update + out,
            exposed_s=0.0,
        )
    warm, back = forward_ends(c, x, (0, 1)), backward_ends(b, x, g, a)
    return Resident(
        forward_s=warm.ends_s[-1],
        backward_s=back.ends_s[-1],
        first_s=cold - warm.ends_s[-1],
        update_s=update,
        exposed_s=warm.waits_s[-1] + back.waits_s[-1],
    )


def resident_tables(
    model: CostModel, name: str, samples: int, residence: str, *, recompute: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(forward, backward, once a step) seconds by (i, j) of layers i..j-1 on `name`; infinite for i ≥ j.

    The last is what its update and the step's first forward take more than those of a stage on the device.
    Where the host's memory is short and its disk known, the optimiser's state is on the disk.
    """
    road = road_of(model, name)
    layers = model.layers(model.fleet.device(name).kind)
    forward, backward = layers.seconds(samples)
    c, b = forward.tolist(), (backward + forward if recompute else backward).tolist()
    x, g, a = road.x.tolist(), road.g.tolist(), road.a.tolist()
    count = len(c)
    f, back, once = (np.full((count + 1, count + 1), np.inf) for _ in range(3))
    for i in range(count):
        cold = forward_ends(c[i:], x[i:], ()).ends_s
        warm = forward_ends(c[i:], x[i:], (0, 1)).ends_s if residence == "host" else np.cumsum(c[i:])
        f[i, i + 1 :], once[i, i + 1 :] = warm, np.subtract(cold, warm)
    for j in range(1, count + 1):
        if residence == "host":
            ends = backward_ends(b[:j], x[:j], g[:j], a[:j]).ends_s
        else:
            ends = np.cumsum(b[:j][::-1]).tolist()
        back[:j, j] = ends[::-1]
    data = model.bytes
    held = data.parameters[None, :] - data.parameters[:, None]
    state = data.optimizer[-1] / max(float(data.parameters[-1]), 1.0)
    once += step_passes(float(state)) * held / road.host_bytes_per_s
    if disk := host_disk(model.fleet, name):
        kept = data.optimizer[None, :] - data.optimizer[:, None]
        made = data.gradients[None, :] - data.gradients[:, None]
        short = held + made + kept > host_room(model.fleet, name)
        once += np.where(short, disk.seconds(1.0, 1.0) * kept, 0.0)
    if residence == "host-optimizer":
        gone = np.concatenate([[0.0], road.g.cumsum()])
        once += gone[None, :] - gone[:, None]
    own = np.concatenate([[0.0], layers.update_s.cumsum()])
    return f, back, once - (own[None, :] - own[:, None])


def in_words(told: Resident, stage: Stage, name: str) -> str:
    """What a residence does to the steps of device `name`, in a sentence."""
    disk = ", in which its state is read from disk and written again" if stage.state_on_disk else ""
    if stage.residence == "host-optimizer":
        return (
            f"{name}: the optimiser of {counted(len(stage.layers), 'layer')} steps on the host in "
            f"{told.update_s * 1e3:.4g} ms, gradients on their way there included{disk}; "
            f"parameters come back behind the next forward, which waits {told.first_s * 1e3:.4g} ms for them"
        )
    return (
        f"{name}: from the host come {counted(len(stage.layers), 'layer')}, one ahead of their use; "
        f"computing waits {told.exposed_s * 1e3:.4g} ms in each micro-batch and "
        f"{told.first_s * 1e3:.4g} ms at a step's "
        f"begin; the optimiser steps there in {told.update_s * 1e3:.4g} ms{disk}"
    )
