"""The planner against exhaustive enumeration on small random instances.

    python benchmarks/planner_oracle.py --seed 0 --count 300 --json

An instance has 2 to 5 devices of 2 or 3 kinds on 1 or 2 hosts, 2 to 8 layers, memory limits and links.
Enumerated is every plan of the shape: which devices form which pipelines, stage order, stages shared by up
to three devices with every split of the micro-batch, every cut, every micro-batch size up to 8, samples per
pipeline, devices left out. A stage recomputes exactly where it does not fit otherwise (it costs time and
brings nothing else). All plans that could beat the planner's are priced by the cost model; a plan is
skipped only when its compute alone, or its compute and the cheapest possible reduction of the first layer
of a stage, already takes longer.
"""

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from evener.core.figures import Figure, line
from evener.core.fleet import Device, Fleet, Link
from evener.core.job import Job
from evener.core.plan import Pipeline, Plan, Share, Stage, micro_batch_sizes
from evener.core.profile import Layer, Profile, Timing
from evener.core.split import apportion
from evener.cost.evaluate import CostModel, evaluate
from evener.cost.memory import usable_bytes
from evener.cost.sums import with_groups
from evener.errors import NoPlanFitsError
from evener.planner import plan as best_plan

MOST_MEMBERS = 3
SHAPES = ((2, 8, 16), (3, 8, 12), (3, 6, 8), (4, 6, 8), (4, 4, 12), (5, 5, 6), (5, 3, 8))


def figure(value: float) -> Figure:
    return Figure(value=value, source="measured")


def instance(seed: int, *, tied: bool = False) -> tuple[Fleet, Profile, Job]:
    """A random fleet, profile and job; the same seed gives the same instance.

    With `tied` the first and the last layer share storage, as an embedding and a head do.
    """
    r = random.Random(seed)
    most_devices, most_layers, most_samples = r.choice(SHAPES)
    num_devices, num_layers = r.randint(2, most_devices), r.randint(2, most_layers)
    kinds = [f"kind{i}" for i in range(r.randint(2, 3))]
    speed = {k: r.choice((1, 1.5, 2, 3, 4, 6)) for k in kinds}
    fixed = {k: r.uniform(0, 0.5) for k in kinds}
    layers, timings = [], []
    for i in range(num_layers):
        work = r.choice((1, 1, 1, 2, 3)) * r.uniform(0.8, 1.2)
        layers.append(
            Layer(
                name=f"layer{i}",
                num_params=1,
                param_bytes=int(r.choice((1, 4, 16)) * 2**20),
                output_bytes_per_sample=int(2 ** r.uniform(10, 20)),
                saved_bytes_per_sample=int(r.uniform(0.5, 4) * 2**20),
            )
        )
        for k in kinds:
            scatter = r.uniform(0.95, 1.05)
            for b in (1, 2, 4, 8):
                seconds = work * (fixed[k] + b) / speed[k] * scatter * 1e-3
                timings.append(
                    Timing(
                        layer=f"layer{i}",
                        kind=k,
                        micro_batch=b,
                        forward_s=figure(seconds),
                        backward_s=figure(2 * seconds),
                        update_s=figure(1e-5),
                    )
                )
    if tied:
        first, last = layers[0], layers[-1]
        layers[0] = replace(first, tied=(last.name,))
        layers[-1] = replace(last, tied=(first.name,), param_bytes=first.param_bytes)
    total = sum(x.param_bytes for x in (layers[:-1] if tied else layers))
    tight = r.random() < 0.6
    devices: list[Device] = []
    for number in range(num_devices):
        kind = kinds[number] if number < 2 else r.choice(kinds)
        memory = total * 4 * (r.uniform(0.4, 1.5) if tight else 10) + 2**25
        twin = next((d for d in devices if d.kind == kind), None)
        if twin and twin.memory_bytes and r.random() < 0.5:
            memory = twin.memory_bytes.value
        devices.append(Device(name=f"host{r.randint(0, 1)}/{number}", kind=kind, memory_bytes=figure(memory)))
    hosts = sorted({d.host for d in devices})
    links = [Link(a=h, b=h, curve=line(10 ** r.uniform(-5, -4), 10 ** r.uniform(9, 10.5))) for h in hosts]
    if len(hosts) > 1:
        between = line(10 ** r.uniform(-4.3, -3.3), 10 ** r.uniform(8, 10))
        links.append(Link(a=hosts[0], b=hosts[1], curve=between))
    profile = Profile(
        model="random",
        layers=tuple(layers),
        timings=tuple(timings),
        state_bytes=2 * total,
        gradient_bytes=total,
    )
    job = Job(global_batch=r.randint(max(2, most_samples // 2), most_samples))
    return Fleet(devices=tuple(devices), links=tuple(links)), profile, job


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A pipeline over concrete devices with a bound on the step it can be part of."""

    pipeline: Pipeline
    alone_s: float
    beside_s: float


class Enumeration:
    """All pipelines and plans of one instance that could take less than `limit_s`."""

    def __init__(self, fleet: Fleet, profile: Profile, job: Job) -> None:
        self.fleet, self.profile, self.job = fleet, profile, job
        self.model = CostModel(fleet=fleet, profile=profile)
        self.usable = {d.name: usable_bytes(d, job.memory_margin) for d in fleet.devices}
        names = [d.name for d in fleet.devices]
        sizes = self.model.bytes.summed
        self.cheapest = {
            a: np.array(
                [min(self.model.network.all_reduce_s((a, b), s) for b in names if b != a) for s in sizes]
            )
            for a in names
        }
        self.priced = 0

    def best(self, limit_s: float) -> tuple[float, Plan | None]:
        """The fastest plan below `limit_s`, or (limit_s, None)."""
        by_devices: dict[frozenset[int], dict[int, list[Candidate]]] = {}
        for order in self._orders():
            for samples in range(1, self.job.global_batch + 1):
                found = [c for c in self._candidates(order, samples) if self._bound(c, samples) < limit_s]
                if found:
                    key = frozenset(i for stage in order for i in stage)
                    by_devices.setdefault(key, {}).setdefault(samples, []).extend(found)
        best, plan = limit_s, None
        for parts in self._combinations(by_devices, frozenset(), self.job.global_batch, 0):
            if len(parts) == 1 and parts[0].alone_s >= best:
                continue
            if len(parts) > 1 and max(c.beside_s for c in parts) >= best:
                continue
            drafted = Plan(global_batch=self.job.global_batch, pipelines=tuple(c.pipeline for c in parts))
            self.priced += 1
            seconds = evaluate(self.model, with_groups(self.model, drafted)).step_s
            if seconds < best:
                best, plan = seconds, drafted
        return best, plan

    def _bound(self, candidate: Candidate, samples: int) -> float:
        return candidate.alone_s if samples == self.job.global_batch else candidate.beside_s

    def _orders(self) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Ordered stages over any devices; of devices that are alike the first ones, in order."""
        count = len(self.fleet.devices)

        def extend(left: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
            yield ()
            for size in range(1, MOST_MEMBERS + 1):
                for block in itertools.combinations(left, size):
                    for others in extend(tuple(i for i in left if i not in block)):
                        yield (block, *others)

        for order in extend(tuple(range(count))):
            if order and len(order) <= len(self.profile.layers):
                yield order

    def _candidates(self, order: tuple[tuple[int, ...], ...], samples: int) -> Iterator[Candidate]:
        names = [tuple(self.fleet.devices[i].name for i in block) for block in order]
        for size in range(1, min(8 * max(map(len, order)), samples) + 1):
            if any(len(block) > size for block in order):
                continue
            splits = [list(compositions(size, len(block))) for block in order]
            for cut in itertools.combinations(range(1, len(self.profile.layers)), len(order) - 1):
                yield from self._cut(names, (0, *cut, len(self.profile.layers)), size, samples, splits)

    def _cut(self, names, edges, size: int, samples: int, splits) -> Iterator[Candidate]:
        sizes = micro_batch_sizes(samples, size)
        options = []
        for s, block in enumerate(names):
            in_flight = min(len(names) - s, len(sizes))
            row = []
            for parts in splits[s]:
                recompute = self._recompute(block, edges[s], edges[s + 1], parts, in_flight)
                if recompute is not None:
                    row.append((parts, recompute))
            options.append(row)
        layers = [x.name for x in self.profile.layers]
        for chosen in itertools.product(*options):
            stages = tuple(
                Stage(
                    layers=tuple(layers[edges[s] : edges[s + 1]]),
                    shares=tuple(Share(devices=(n,), samples=k) for n, k in zip(block, parts, strict=True)),
                    recompute=recompute,
                )
                for s, (block, (parts, recompute)) in enumerate(zip(names, chosen, strict=True))
            )
            yield self._bounded(Pipeline(samples=samples, micro_batch=size, stages=stages), edges, sizes)

    def _recompute(self, block, first: int, last: int, parts, in_flight: int) -> bool | None:
        """Whether the stage must recompute; None when it does not fit even so."""
        for again in (False, True):
            fits = True
            for name, samples in zip(block, parts, strict=True):
                if samples > 8:
                    return None
                data = self.model.bytes
                held = data.fixed(first, last) + samples * float(
                    data.per_sample(np.int64(first), last, in_flight, recompute=again)
                )
                fits = fits and held <= self.usable[name]
            if fits:
                return again
        return None

    def _bounded(self, pipeline: Pipeline, edges, sizes) -> Candidate:
        times = [
            self._stage_seconds(stage, edges[s], edges[s + 1], sizes)
            for s, stage in enumerate(pipeline.stages)
        ]
        sends = [self._send_seconds(pipeline, s, edges, sizes) for s in range(len(times) - 1)]
        ends = play(times, sends, len(sizes))
        starts = [
            max(
                float(self.model.layers(self.fleet.device(n).kind).update_s[edges[s] : edges[s + 1]].sum())
                for share in stage.shares
                for n in share.devices
            )
            for s, stage in enumerate(pipeline.stages)
        ]
        end = max(ends) + 0.0 * sum(starts)
        reduced = max(
            ends[s] + max(self.cheapest[n][edges[s]] for share in stage.shares for n in share.devices)
            for s, stage in enumerate(pipeline.stages)
        )
        return Candidate(pipeline=pipeline, alone_s=end, beside_s=max(end, reduced))

    def _stage_seconds(self, stage: Stage, first: int, last: int, sizes) -> list[tuple[float, float]]:
        rows = []
        for size in (sizes[0], sizes[-1]):
            forward = backward = 0.0
            for share, samples in zip(
                stage.shares, apportion(size, [x.samples for x in stage.shares]), strict=True
            ):
                if samples:
                    f, b = self.model.layers(self.fleet.device(share.devices[0]).kind).seconds(samples)
                    mine = float(f[first:last].sum())
                    forward = max(forward, mine)
                    backward = max(backward, float(b[first:last].sum()) + (mine if stage.recompute else 0.0))
            rows.append((forward, backward))
        return rows

    def _send_seconds(self, pipeline: Pipeline, s: int, edges, sizes) -> tuple[float, float]:
        found = []
        for size in (sizes[0], sizes[-1]):
            sides = []
            for stage in pipeline.stages[s : s + 2]:
                parts = apportion(size, [x.samples for x in stage.shares])
                owners = [x.devices[0] for x, n in zip(stage.shares, parts, strict=True) for _ in range(n)]
                sides.append(owners)
            spent: dict[str, float] = {}
            pairs: dict[tuple[str, str], int] = {}
            for a, b in zip(*sides, strict=True):
                pairs[a, b] = pairs.get((a, b), 0) + 1
            for (a, b), count in pairs.items():
                num_bytes = count * self.model.bytes.output[edges[s + 1] - 1]
                spent[a] = spent.get(a, 0.0) + self.model.network.send_s(a, b, num_bytes)
            found.append(max(spent.values()))
        return found[0], found[1]

    def _combinations(self, by_devices, used, samples: int, start: int) -> Iterator[tuple[Candidate, ...]]:
        """Pipelines over disjoint devices that take exactly `samples`."""
        if samples == 0:
            yield ()
            return
        for key, by_samples in by_devices.items():
            if key & used or min(key) < start:
                continue
            for n, candidates in by_samples.items():
                if n > samples:
                    continue
                for others in self._combinations(by_devices, used | key, samples - n, min(key) + 1):
                    for c in candidates:
                        yield (c, *others)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as `parts` positive whole numbers."""
    for edges in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in zip((0, *edges), (*edges, total), strict=True))


def play(times, sends, micro_batches: int) -> list[float]:
    """1F1B by its own rules: a list of actions a stage, each done when its data is there."""
    count = len(times)
    todo = []
    for s in range(count):
        ahead = min(count - s - 1, micro_batches)
        row = [("F", i) for i in range(ahead)]
        for i in range(micro_batches):
            if ahead + i < micro_batches:
                row.append(("F", ahead + i))
            row.append(("B", i))
        todo.append(row)
    done: dict[tuple[str, int, int], float] = {}
    at, free = [0] * count, [0.0] * count
    while any(at[s] < len(todo[s]) for s in range(count)):
        for s in range(count):
            while at[s] < len(todo[s]):
                what, i = todo[s][at[s]]
                last = int(i == micro_batches - 1)
                peer = s - 1 if what == "F" else s + 1
                ready = 0.0
                if 0 <= peer < count:
                    if (what, peer, i) not in done:
                        break
                    ready = done[what, peer, i] + sends[min(s, peer)][last]
                free[s] = max(free[s], ready) + times[s][last][0 if what == "F" else 1]
                done[what, s, i] = free[s]
                at[s] += 1
    return free


def run(seed: int, count: int) -> dict:
    rows = []
    for number in range(seed, seed + count):
        fleet, profile, job = instance(number)
        began = time.perf_counter()
        try:
            planned = best_plan(fleet, profile, job, shapes="all").plan
            seconds = evaluate(CostModel(fleet=fleet, profile=profile), planned).step_s
        except NoPlanFitsError:
            planned, seconds = None, float("inf")
        spent = time.perf_counter() - began
        began = time.perf_counter()
        enumeration = Enumeration(fleet, profile, job)
        best, better = enumeration.best(seconds)
        ratio = 1.0 if best == seconds else float(seconds / best)
        rows.append(
            {
                "seed": number,
                "devices": len(fleet.devices),
                "layers": len(profile.layers),
                "samples": job.global_batch,
                "ratio": ratio,
                "fits": bool(best < float("inf")),
                "planner_seconds": spent,
                "oracle_seconds": time.perf_counter() - began,
                "priced": enumeration.priced,
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if better and ratio > 1.001:
            print(
                "  planned",
                planned
                and [
                    (
                        p.micro_batch,
                        p.samples,
                        [
                            (len(s.layers), [(x.devices[0], x.samples) for x in s.shares], s.recompute)
                            for s in p.stages
                        ],
                    )
                    for p in planned.pipelines
                ],
                file=sys.stderr,
            )
            print(
                "  best   ",
                [
                    (
                        p.micro_batch,
                        p.samples,
                        [
                            (len(s.layers), [(x.devices[0], x.samples) for x in s.shares], s.recompute)
                            for s in p.stages
                        ],
                    )
                    for p in better.pipelines
                ],
                file=sys.stderr,
            )
    optimal = sum(r["ratio"] <= 1 + 1e-9 for r in rows)
    return {
        "instances": len(rows),
        "optimal": optimal,
        "worst_ratio": max(r["ratio"] for r in rows),
        "within_1_percent": sum(r["ratio"] <= 1.01 for r in rows),
        "no_plan_fits": sum(not r["fits"] for r in rows),
        "planner_seconds": sum(r["planner_seconds"] for r in rows),
        "oracle_seconds": sum(r["oracle_seconds"] for r in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    found = run(args.seed, args.count)
    print(
        f"{found['optimal']} of {found['instances']} optimal, worst {found['worst_ratio']:.4f} of the best",
        file=sys.stderr if args.json else sys.stdout,
    )
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
