"""Devices that are interchangeable are one group, so that a search does not grow with their number."""

from dataclasses import dataclass, replace

from evener.core.fleet import Device, Fleet
from evener.core.job import Job
from evener.core.profile import Profile
from evener.core.words import in_bytes, in_time
from evener.cost.memory import usable_bytes
from evener.cost.step import StepCost, step_cost
from evener.errors import OutOfRangeError, UnknownNameError
from evener.planner.placing import banned_layers

ALLOW = "tensor-parallel"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Devices of one kind, host and usable memory without links of their own; `cap` is their largest
    micro-batch.
    """

    names: tuple[str, ...]
    kind: str
    usable_bytes: float
    cost: StepCost | None
    cap: int
    refusal: str = ""
    banned: frozenset[int] = frozenset()
    price_per_hour: float | None = None
    degree: int = 1
    teams: tuple[tuple[str, ...], ...] = ()


def degrees_of(profile: Profile, kind: str) -> tuple[int, ...]:
    """Tensor-parallel degrees at which every layer is measured on `kind`; whole-model steps count as degree
    1.
    """
    found = {1} if any(s.kind == kind for s in profile.steps) else set()
    for degree in {t.tensor_parallel for t in profile.timings if t.kind == kind}:
        layers = {t.layer for t in profile.timings if t.kind == kind and t.tensor_parallel == degree}
        if len(layers) == len(profile.layers):
            found.add(degree)
    return tuple(sorted(found))


def groups_of(fleet: Fleet, profile: Profile, job: Job) -> tuple[Group, ...]:
    """The groups of `fleet` in order of first device. UnknownNameError for a kind the profile does not
    hold.
    """
    linked = {end for link in fleet.links for end in (link.a, link.b)}
    members: dict[tuple, list[Device]] = {}
    banned = banned_layers(job.place, fleet, profile) if job.place else {}
    for device in fleet.devices:
        own = device.name if device.name in linked else ""
        price = device.price_per_hour.value if device.price_per_hour else None
        key = (
            device.kind,
            device.host,
            usable_bytes(device, job.memory_margin),
            own,
            price,
            banned.get(device.name),
        )
        members.setdefault(key, []).append(device)
    costs: dict[str, StepCost | str] = {}
    for kind in dict.fromkeys(d.kind for d in fleet.devices):
        try:
            costs[kind] = step_cost(profile, kind)
        except OutOfRangeError as e:
            costs[kind] = f"{e.what} ({e.numbers})"
        except UnknownNameError:
            if ALLOW not in job.allow or not degrees_of(profile, kind):
                raise
            costs[kind] = f"{kind} is measured in tensor-parallel groups only"
    return tuple(
        replace(
            _group(devices, key[2], costs[key[0]], job), banned=key[-1] or frozenset(), price_per_hour=key[4]
        )
        for key, devices in members.items()
    )


def _group(devices: list[Device], usable: float, cost: StepCost | str, job: Job) -> Group:
    names = tuple(d.name for d in devices)
    kind = devices[0].kind
    if isinstance(cost, str):
        return Group(names=names, kind=kind, usable_bytes=usable, cost=None, cap=0, refusal=cost)
    cap = cost.largest_within(usable)
    refusal = ""
    if cap == 0:
        refusal = (
            f"one sample needs {gib(cost.peak_bytes[1])}, {names[0]} offers {gib(usable)} "
            f"(margin {job.memory_margin:.0%})"
        )
    return Group(names=names, kind=kind, usable_bytes=usable, cost=cost, cap=cap, refusal=refusal)


def gib(num_bytes: float) -> str:
    """Bytes for people. Example: gib(3 * 2**30) = "3 GiB"; gib(2**20) = "1 MiB"."""
    return in_bytes(num_bytes)


def ms(seconds: float) -> str:
    """Seconds for people. Example: ms(0.0651) = "65.1 ms"; ms(12.3) = "12.3 s"."""
    return in_time(seconds)
