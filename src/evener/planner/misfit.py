"""Why no plan fits the memory: the sum, what one device can hold at most, and what would fit."""

import math

import numpy as np

from evener.core.job import Job
from evener.cost.memory import ModelBytes
from evener.errors import NoPlanFitsError
from evener.planner.blocks import Tables, has_road
from evener.planner.groups import ALLOW, Group, degrees_of, gib


def nothing_fits(tables: Tables, job: Job) -> NoPlanFitsError:
    """The error for a job that no plan was found for; "no plan fits" only where that is certain.

    A device holds at most so many consecutive layers with one sample at a time and nothing kept but the
    stage's input; where all devices together hold fewer than the model has, nothing can fit.
    """
    data, profile = tables.model.bytes, tables.model.profile
    sums = {
        "parameters": float(data.parameters[-1]),
        "gradients": float(data.gradients[-1]),
        "optimiser state": float(data.optimizer[-1]),
        "buffers": float(data.buffers[-1]),
    }
    sums["reduction"] = float(data.underway(0, data.num_layers))
    held = sum(sums.values())
    room = sum(g.usable_bytes * len(g.names) for g in tables.groups)
    teams = [_degree(tables, g, job) for g in tables.groups]
    most = [
        _most_layers(tables.model.bytes_at(d), g.usable_bytes)
        for g, d in zip(tables.groups, teams, strict=True)
    ]
    layers = sum(k * (len(g.names) // d) for g, k, d in zip(tables.groups, most, teams, strict=True))
    roads = any(has_road(tables.model, g) for g in tables.groups)  # the host's memory is not counted here
    certain = not roads and (held > room or layers < data.num_layers)
    each = dict.fromkeys(
        f"{g.kind}{_team(d)}: {k or 'not one'}" for g, k, d in zip(tables.groups, most, teams, strict=True)
    )
    name, need = _largest_layer(tables)
    numbers = (
        f"{', '.join(f'{n} {gib(b)}' for n, b in sums.items() if b)} make {gib(held)}, activations of a "
        f"sample {gib(float(data.saved[-1]))}; the devices offer {gib(room)} in all (margin "
        f"{job.memory_margin:.0%}). "
        f"Of {data.num_layers} layers one device holds at most: {'; '.join(each)} ({name} alone needs "
        f"{gib(need)})"
    )
    large = max(tables.groups, key=lambda g: g.usable_bytes)
    remedies = []
    if held > room:
        more = math.ceil((held - room) / large.usable_bytes)
        room_for = "and room for activations"
        remedies.append(f"{gib(held - room)} more memory, such as {more} more of {large.kind}, {room_for}")
    elif ALLOW not in job.allow and any(set(degrees_of(profile, g.kind)) - {1} for g in tables.groups):
        remedies.append(f"--allow {ALLOW}, which splits a layer over devices of a host")
    else:
        remedies.append("a smaller margin or sample, or larger devices")
    return NoPlanFitsError(
        "no plan fits the devices' memory" if certain else "no plan was found that fits the devices' memory",
        numbers=numbers,
        remedy=" or ".join(remedies),
    )


def _team(degree: int) -> str:
    return f" x {degree}" if degree > 1 else ""


def _degree(tables: Tables, group: Group, job: Job) -> int:
    """The largest team that devices of this group may form."""
    if ALLOW not in job.allow:
        return 1
    fitting = [d for d in degrees_of(tables.model.profile, group.kind) if d <= len(group.names)]
    return max(fitting, default=1)


def _most_layers(data: ModelBytes, usable: float) -> int:
    """The longest run of layers that fits with one sample in flight, recomputed."""
    i, j = (a.ravel() for a in np.indices((data.num_layers + 1, data.num_layers + 1)))
    i, j = i[i < j], j[i < j]
    need = data.peak(i, j, 1, 1, recompute=True)
    fits = need <= usable
    return int((j - i)[fits].max()) if fits.any() else 0


def _largest_layer(tables: Tables) -> tuple[str, float]:
    data = tables.model.bytes
    i = np.arange(data.num_layers)
    need = data.peak(i, i + 1, 1, 1, recompute=True)
    return tables.model.profile.layers[int(need.argmax())].name, float(need.max())
