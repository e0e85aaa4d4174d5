"""A row of a published file as a fleet and a plan: replicas become tensor-parallel groups on hosts.

row      stages → replicas (kind, devices in a group, devices in a host)
plan     pipeline p → stage s → one share: the group of replica p of stage s
fleet    a host holds as many groups as fit; a bus between two hosts carries what their groups send at once
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from benchmarks.published_data import Published
from evener.core.figures import Curve, Figure
from evener.core.fleet import Device, Fleet, Link
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.profile import Profile, Timing
from evener.core.split import apportion
from evener.cost.layers import FAR
from evener.cost.trainer import Trainer
from evener.errors import EvenerError, FileError

FLAT = float("inf")
"""Bucket size of a trainer that sums all gradients in one flat copy."""


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """What the published runs cost beyond layers and links; the constants of `published.json` by name."""

    timing_s: float
    sustained: float
    reduce_efficiency: float
    step_end_s: float
    framework_bytes: float
    transient_layers: float

    @property
    def trainer(self) -> Trainer:
        return Trainer(
            blocking_sends=True,
            bucket_bytes=FLAT,
            transient_layers=self.transient_layers,
            step_s=self.step_end_s,
        )


@dataclass(frozen=True, kw_only=True)
class Group:
    """Devices of one replica of one stage."""

    kind: str
    devices: tuple[str, ...]

    @property
    def host(self) -> str:
        return self.devices[0].partition("/")[0]

    @property
    def lanes(self) -> tuple[str, int]:
        return self.kind, len(self.devices)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row ready to be priced, and what had to be assumed."""

    row: dict[str, Any]
    fleet: Fleet
    plan: Plan
    profile: Profile
    notes: tuple[str, ...]


def kinds_of(row: dict[str, Any]) -> list[str]:
    """The kinds of device that `row` uses, sorted."""
    return sorted({r["kind"] for s in row["stages"] for r in s["replicas"]})


def case_of(published: Published, row: dict[str, Any], overheads: Overheads) -> Case:
    """The fleet, plan and profile of `row`. FileError when the row makes no plan."""
    notes: dict[str, None] = {}
    kinds = kinds_of(row)
    profile = published.profile(row["model"], kinds)
    degrees = {(r["kind"], r["tp"]) for s in row["stages"] for r in s["replicas"]}
    for kind in kinds:
        for note, degree in published.notes.get((row["model"], kind), {}).items():
            if not degree or (kind, degree) in degrees:
                notes[f"{kind}: {note}"] = None
    try:
        stages = _groups(row, notes)
        plan = _plan(row, stages, [layer.name for layer in profile.layers], notes)
        fleet = _fleet(published, row, stages, overheads, notes)
    except (KeyError, TypeError, ValueError) as e:
        if isinstance(e, EvenerError):
            raise
        raise FileError(
            f"row {row.get('id')} makes no plan: {e!r}", remedy="a row of the shape in the data's README"
        ) from e
    profile = reaching(corrected(profile, overheads, kinds), degrees, row["micro_batch"], notes)
    return Case(row=row, fleet=fleet, plan=plan, profile=profile, notes=tuple(notes))


def corrected(profile: Profile, overheads: Overheads, kinds: list[str]) -> Profile:
    """Layer seconds of a long run from those of layers timed alone: less `timing_s`, times `sustained`.

    At most three quarters of a time are taken off. Example: 1.15 ms, 0.15 ms less, times 1.04: 1.04 ms.
    """

    def figure(f: Figure | None) -> Figure | None:
        if f is None:
            return None
        value = max(f.value - overheads.timing_s, f.value / 4) * overheads.sustained
        return Figure(value=value, source=f.source if f.source == "assumed" else "fitted", spread=f.spread)

    timings = tuple(
        replace(t, forward_s=figure(t.forward_s), backward_s=figure(t.backward_s))
        for t in profile.timings
        if t.kind in kinds
    )
    return replace(profile, timings=timings)


def reaching(
    profile: Profile, degrees: Iterable[tuple[str, int]], size: int, notes: dict[str, None]
) -> Profile:
    """`profile` with these (kind, degree) and micro-batch `size`, in proportion where they lie outside.

    Each assumption is added to `notes`.
    """
    timings = list(profile.timings)
    for kind, degree in sorted(degrees):
        own = [t for t in timings if t.kind == kind and t.tensor_parallel == degree]
        if not own:
            known = {t.tensor_parallel for t in timings if t.kind == kind}
            near = min(known, key=lambda d: (abs(math.log(d / degree)), d))
            own = [
                _scaled(t, near / degree, degree=degree)
                for t in timings
                if t.kind == kind and t.tensor_parallel == near
            ]
            timings += own
            notes[f"assumed: {kind} in groups of {degree} as those of {near}, work shared out"] = None
        largest, least = (f(t.micro_batch for t in own) for f in (max, min))
        if size > largest:
            notes[f"assumed: micro-batch {size} on {kind} in proportion to {largest}, the largest"] = None
        if size < least:
            notes[f"assumed: micro-batch {size} on {kind} as {least}, the smallest"] = None
        if size > FAR * largest:
            timings += [_scaled(t, size / largest, size=size) for t in own if t.micro_batch == largest]
    return replace(profile, timings=tuple(timings))


def _scaled(t: Timing, factor: float, *, degree: int | None = None, size: int | None = None) -> Timing:
    def times(f: Figure | None, by: float) -> Figure | None:
        return Figure(value=f.value * by, source="assumed", spread=f.spread) if f else None

    return replace(
        t,
        tensor_parallel=degree or t.tensor_parallel,
        micro_batch=size or t.micro_batch,
        forward_s=times(t.forward_s, factor),
        backward_s=times(t.backward_s, factor),
        update_s=times(t.update_s, factor if degree else 1.0),
    )


def _groups(row: dict[str, Any], notes: dict[str, None]) -> list[list[Group]]:
    """The groups by stage and replica. A host each where the row lists enough hosts, else as many as fit."""
    replicas = [r for s in row["stages"] for r in s["replicas"]]
    spread = (row.get("hosts") or 0) >= len(replicas)
    free: dict[tuple[str, int], tuple[str, int]] = {}  # what is left in the host being filled
    hosts = 0
    stages = []
    for stage in row["stages"]:
        placed = []
        for r in stage["replicas"]:
            room = max(r.get("gpus_per_host") or r["tp"], r["tp"])
            host, used = free.get((r["kind"], room), ("", room))
            if spread or used + r["tp"] > room:
                host, used, hosts = f"host{hosts}", 0, hosts + 1
            names = tuple(f"{host}/gpu{used + i}" for i in range(r["tp"]))
            free[r["kind"], room] = (host, used + r["tp"])
            placed.append(Group(kind=r["kind"], devices=names))
        stages.append(placed)
    if row.get("hosts") and row["hosts"] != hosts:
        notes[f"assumed: groups packed in {hosts} hosts, the row lists {row['hosts']}"] = None
    return stages


def _plan(row: dict[str, Any], stages: list[list[Group]], names: list[str], notes: dict[str, None]) -> Plan:
    copies = row.get("data_parallel") or max(len(s) for s in stages)
    if any(len(s) != copies for s in stages):
        notes[f"assumed: {copies} pipelines take the replicas of each stage in turn"] = None
    size = row["micro_batch"]
    samples = apportion(row["global_batch"], [1] * copies)
    pipelines = []
    for p in range(copies):
        made = []
        for stage, groups in zip(row["stages"], stages, strict=True):
            first, end = stage["layers"]
            share = Share(devices=groups[p % len(groups)].devices, samples=size)
            made.append(Stage(layers=tuple(names[first:end]), shares=(share,)))
        pipelines.append(Pipeline(samples=samples[p], micro_batch=size, stages=tuple(made)))
    return Plan(global_batch=row["global_batch"], pipelines=tuple(pipelines), schedule="1f1b")


def _fleet(
    published: Published,
    row: dict[str, Any],
    stages: list[list[Group]],
    overheads: Overheads,
    notes: dict[str, None],
) -> Fleet:
    """Devices, and a link between every two hosts that a stage or a cut joins."""
    framework = Figure(value=overheads.framework_bytes, source="fitted")
    devices = {
        name: Device(name=name, kind=g.kind, framework_bytes=framework)
        for groups in stages
        for g in groups
        for name in g.devices
    }
    pairs = [(a, b) for groups in stages for a, b in itertools.combinations(groups, 2)]
    copies = row.get("data_parallel") or max(len(s) for s in stages)
    for p in range(copies):
        chain = [groups[p % len(groups)] for groups in stages]
        pairs += [(a, b) for a, b in itertools.pairwise(chain) if a is not b]
    links: dict[frozenset[str], Link] = {}
    slowed: dict[tuple, tuple[Curve, Curve]] = {}
    for a, b in pairs:
        ends = frozenset((a.host, b.host))
        if ends in links:
            continue
        key = (*sorted((a.lanes, b.lanes)), a.host == b.host)
        if key not in slowed:
            curve, note = published.curve(a.lanes, b.lanes, inside=a.host == b.host)
            notes |= {note: None} if note else {}
            slowed[key] = (curve, times(curve, 1 / overheads.reduce_efficiency))
        curve, reducing = slowed[key]
        bus = "|".join(sorted(ends))
        links[ends] = Link(a=a.host, b=b.host, curve=curve, reduce_curve=reducing, bus=bus)
    return Fleet(devices=tuple(devices.values()), links=tuple(links.values()))


def times(curve: Curve, factor: float) -> Curve:
    """The same curve, `factor` times as long."""
    return replace(curve, points=tuple((n, s * factor) for n, s in curve.points))
