"""Plans for many devices: templates by class, packed, placed on hosts, judged exactly."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace as replaced

import numpy as np

from evener.core.job import Job
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.cost.evaluate import pipeline_cost
from evener.planner.aim import Aim
from evener.planner.balance import balance
from evener.planner.blocks import Tables
from evener.planner.groups import Group
from evener.planner.ladder import Ladder, Mix, Template, stage_limit
from evener.planner.packing import Shelf, fewest_seconds, shelf

_MOST_MIXES = 3000
_MOST_SIZES = 5
_LONG = 8  # stages
_ALIKE = 1.1
_MOST_ALONE = 12
_ALIGNED_FROM = 16


def classes_of(groups: Sequence[Group], *, alike: float = 1.0) -> tuple[Group, ...]:
    """Groups of one kind, memory, price and wishes as one class, whatever their host.

    With `alike` above 1 those whose memory is about the same factor are one class too, with the least of it.
    """
    merged: dict[tuple, list[Group]] = {}
    for g in groups:
        level = g.usable_bytes
        if alike > 1 and 0 < level < math.inf:
            level = round(math.log(level, alike))
        merged.setdefault((g.kind, g.degree, level, g.banned, g.price_per_hour), []).append(g)
    return tuple(
        replaced(
            held[0],
            names=tuple(n for g in held for n in g.names),
            teams=tuple(t for g in held for t in g.teams),
            usable_bytes=min(g.usable_bytes for g in held),
        )
        for held in merged.values()
    )


def affordable(tables: Tables, aim: Aim) -> list[Tables]:
    """The tables as they are; where money counts, also with each class alone, all within the price limit.

    Over the limit the classes that are dearest for their speed go first.
    """
    if not aim.prices:
        return [tables]
    found = []
    for chosen in (tables.groups, *((g,) for g in tables.groups)):
        kept = []
        left = aim.max_price_per_hour if aim.max_price_per_hour is not None else float("inf")
        for g in sorted(chosen, key=lambda g: aim.prices[g.names[0]] * tables.seconds_a_sample(g)):
            price = aim.prices[g.names[0]]
            count = len(g.names) if price * len(g.names) <= left else int(left / price)
            if count:
                kept.append(replaced(g, names=g.names[:count]))
                left -= count * price
        if tuple(kept) == tables.groups:
            found.append(tables)
        elif kept:
            found.append(Tables(model=tables.model, groups=tuple(kept), global_batch=tables.global_batch))
    return found


def with_fewer_classes(tables: Tables) -> list[Tables]:
    """The tables, and where so many classes leave only short pipelines to look at, also fewer of them.

    Cards of a kind differ a little in what is free: those alike as one class. Then the fastest classes alone.
    """

    def are_few(groups: Sequence[Group]) -> bool:
        counts = tuple(len(g.names) for g in groups)
        long = min(_LONG, sum(counts), tables.num_layers)
        return stage_limit(counts, tables.num_layers, _MOST_MIXES) >= long

    if are_few(tables.groups):
        return [tables]
    alike = classes_of(tables.groups, alike=_ALIKE)
    fast = sorted(alike, key=tables.seconds_a_sample)
    while len(fast) > 1 and not are_few(fast):
        del fast[-1]
    steps = [tables.groups, alike, tuple(fast)]
    fewer = [b for a, b in itertools.pairwise(steps) if len(b) < len(a)]
    return [tables, *(Tables(model=tables.model, groups=g, global_batch=tables.global_batch) for g in fewer)]


def search_many(tables: Tables, job: Job) -> list[Plan]:
    """The best packings of all and of some templates, with and without regard to the reduction."""
    counts = tuple(len(g.names) for g in tables.groups)
    limit = stage_limit(counts, tables.num_layers, _MOST_MIXES)
    templates: list[Template] = []
    for size in sizes_for_many(tables, job):
        templates += Ladder(tables, counts, size, limit).templates()
    if not templates:
        return []
    bare = shelf(templates, np.zeros(len(templates)))
    careful = shelf(templates, _reduction_guess(tables, templates))
    plans: dict[tuple, Plan] = {}
    shelves = [*variants(bare, counts), *variants(careful, counts)]
    if sum(counts) > _ALIGNED_FROM:
        shelves += _aligned(tables, counts, limit, job)
    drafts = [(some, fewest_seconds(some, counts, job.global_batch)) for some in shelves]
    if sum(counts) <= _ALIGNED_FROM:
        alone = bare.fill + np.maximum(job.global_batch / bare.size - 1, 0.0) * bare.period
        drafts += [(bare, (float(alone[i]), {int(i): 1})) for i in np.argsort(alone)[:_MOST_ALONE]]
    for some, packed in drafts:
        key = tuple(
            sorted((some.templates[i].mix, some.templates[i].micro_batch, k) for i, k in packed[1].items())
        )
        if packed[1] and key not in plans:
            drafted = placed(tables, some, packed[1], job)
            if drafted is not None:
                plans[key] = drafted
    return list(plans.values())


def _aligned(tables: Tables, counts: Mix, limit: int, job: Job) -> list[Shelf]:
    """Templates that are cut at a few common places: their gradients are summed over fewer, whole groups."""
    found = []
    for parts in (8, 16, 24):
        cuts = np.unique(
            np.linspace(0, tables.num_layers, min(parts, tables.num_layers) + 1).round().astype(int)
        )
        templates: list[Template] = []
        for size in sizes_for_many(tables, job):
            templates += Ladder(tables, counts, size, limit, cuts).templates()
        if templates:
            held = shelf(templates, _reduction_guess(tables, templates))
            stages = held.mix.sum(axis=1)
            found += [held] + [held.only(stages > n) for n in (4, 8) if (stages > n).any()]
    return found


def _reduction_guess(tables: Tables, templates: Sequence[Template]) -> np.ndarray:
    """Seconds of the longest stage's gradient sum, guessed as over one device of each of up to 16 hosts."""
    hosts: dict[str, str] = {}
    for g in tables.groups:
        for name in g.names:
            hosts.setdefault(name.partition("/")[0], name)
    names = tuple(list(hosts.values())[:16])
    if len(names) < 2:
        names = tuple(n for g in tables.groups for n in g.names)[:16]
    sizes = tables.model.bytes.summed
    seconds = [tables.model.network.flat_all_reduce_s(names, s) if s else 0.0 for s in sizes]
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    return np.array([np.diff(sums[list(t.cuts)]).max() for t in templates])


def sizes_for_many(tables: Tables, job: Job) -> tuple[int, ...]:
    """The measured micro-batch sizes, thinned to a few."""
    if job.micro_batch is not None:
        return (job.micro_batch,)
    sizes = sorted({int(b) for g in tables.groups for b in tables.layers(g).sizes})
    sizes = [b for b in sizes if b <= job.global_batch] or [1]
    while len(sizes) > _MOST_SIZES:
        del sizes[1::2]
    return tuple(sizes)


def variants(held: Shelf, counts: Mix) -> list[Shelf]:
    """All templates; only long or only short pipelines; one pipeline; without each class."""
    found = [held]
    stages = held.mix.sum(axis=1)
    for most in (1, 2, 4, 8, 16):
        if (stages <= most).any() and stages.max() > most:
            found += [held.only(stages <= most), held.only(stages > most)]
    for k in range(len(counts)):
        without = held.mix[:, k] == 0
        if without.any() and not without.all():
            found.append(held.only(without))
    return found


class Hosts:
    """Free devices by class and host; a pipeline is kept inside a host where that is possible."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._free: list[dict[str, list[str]]] = []
        for g in groups:
            by_host: dict[str, list[str]] = {}
            for name in g.names:
                by_host.setdefault(name.partition("/")[0], []).append(name)
            self._free.append(by_host)

    def take(self, classes: Sequence[int]) -> list[str]:
        """Devices for stages of these classes, in order; each run stays on the host that serves most of
        it.
        """
        names: list[str] = []
        host = ""
        for at, k in enumerate(classes):
            if not self._free[k].get(host):
                host = max(self._free[k], key=lambda h: (self._run(h, classes[at:]), -len(self._free[k][h])))
            names.append(self._free[k][host].pop())
            if not self._free[k][host]:
                del self._free[k][host]
        return names

    def _run(self, host: str, classes: Sequence[int]) -> int:
        used: dict[int, int] = {}
        for at, k in enumerate(classes):
            used[k] = used.get(k, 0) + 1
            if used[k] > len(self._free[k].get(host, ())):
                return at
        return len(classes)


def placed(tables: Tables, held: Shelf, chosen: dict[int, int], job: Job) -> Plan | None:
    """The packing with devices and samples: exact curves of each pipeline, balanced to end together."""
    hosts = Hosts(tables.groups)
    order = sorted(chosen, key=lambda i: -len(held.templates[i].classes))
    drafts: list[tuple[Template, list[str]]] = []
    for i in order:
        for _ in range(chosen[i]):
            drafts.append((held.templates[i], hosts.take(held.templates[i].classes)))
    curves, counts, members = _curves(tables, drafts, job.global_batch)
    found = balance(job.global_batch, curves, counts)
    if found is None:
        return None
    pipelines = []
    for row, which in zip(found[1], members, strict=True):
        for n, at in zip(row, which, strict=True):
            if n:
                template, names = drafts[at]
                pipelines.append(_pipeline(tables, template, names, n))
    schedule = "1f1b" if any(len(p.stages) > 1 for p in pipelines) else "gpipe"
    return Plan(global_batch=job.global_batch, pipelines=tuple(pipelines), schedule=schedule)


def _curves(tables: Tables, drafts: list[tuple[Template, list[str]]], total: int) -> tuple[list, list, list]:
    """Seconds by samples of each distinct draft, how many there are, and which. Exact at a few, lines
    between.
    """
    alike: dict[tuple, list[int]] = {}
    for at, (template, names) in enumerate(drafts):
        sends = tuple(tables.model.network.curve(a, b) for a, b in itertools.pairwise(names))
        alike.setdefault((template, sends), []).append(at)
    curves = []
    for (template, _), members in alike.items():
        size = template.micro_batch
        least, most = 1, -(-total // size)
        numbers = sorted(
            {least, min(2, most), most, *np.unique(np.geomspace(1, most, 12).astype(int)).tolist()}
        )
        names = drafts[members[0]][1]
        ends = [
            pipeline_cost(tables.model, _pipeline(tables, template, names, m * size)).end_s for m in numbers
        ]
        n = np.arange(total + 1)
        seconds = np.interp(-(-n // size), numbers, ends)
        seconds[0] = 0.0
        curves.append(np.maximum.accumulate(seconds).tolist())
    return curves, [len(m) for m in alike.values()], list(alike.values())


def _pipeline(tables: Tables, template: Template, names: Sequence[str], samples: int) -> Pipeline:
    layers = [x.name for x in tables.model.profile.layers]
    count = len(template.classes)
    size = template.micro_batch
    stages = []
    for s, (k, name) in enumerate(zip(template.classes, names, strict=True)):
        first, last = template.cuts[s], template.cuts[s + 1]
        table = tables.stage((k,), size, count - s)
        stages.append(
            Stage(
                layers=tuple(layers[first:last]),
                shares=(Share(devices=tables.devices_of(name), samples=size),),
                **table.choices(first, last),
            )
        )
    return Pipeline(samples=samples, micro_batch=size, stages=tuple(stages))
