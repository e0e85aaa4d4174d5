"""How long the planner takes for many devices, and how far its plans are from a bound.

python benchmarks/planner_scale.py --json
"""

import argparse
import itertools
import json
import random
import resource
import subprocess
import sys
import time

from evener.core.figures import Figure, line
from evener.core.fleet import Device, Fleet, Link
from evener.core.job import Job
from evener.core.profile import Layer, Profile, Timing
from evener.cost.evaluate import CostModel
from evener.planner import plan
from evener.planner.blocks import Tables
from evener.planner.groups import groups_of
from evener.planner.ladder import Ladder

GIB = 2.0**30
SPEEDS = (4.0, 2.0, 1.0, 0.7)  # layers of 10 ms at micro-batch 1 per second and kind, relative
MEMORY = (80, 40, 32, 24)


def figure(value: float) -> Figure:
    return Figure(value=value, source="assumed")


def profile_of(kinds: dict[str, float], num_layers: int, *, param_bytes: float, seed: int = 0) -> Profile:
    """Layers whose work scatters by a fifth, on kinds of these speeds."""
    r = random.Random(seed)
    layers, timings = [], []
    for i in range(num_layers):
        work = r.uniform(0.8, 1.2)
        layers.append(
            Layer(
                name=f"layer{i}",
                num_params=int(param_bytes / 4),
                param_bytes=int(param_bytes),
                output_bytes_per_sample=4 * 2**20,
                saved_bytes_per_sample=200 * 2**20,
            )
        )
        for kind, speed in kinds.items():
            for b in (1, 2, 4, 8):
                seconds = work * (0.3 + b) / speed * 1e-2
                timings.append(
                    Timing(
                        layer=f"layer{i}",
                        kind=kind,
                        micro_batch=b,
                        forward_s=figure(seconds),
                        backward_s=figure(2 * seconds),
                        update_s=figure(1e-4),
                    )
                )
    return Profile(
        model="scale",
        layers=tuple(layers),
        timings=tuple(timings),
        gradient_bytes=int(param_bytes * num_layers),
        state_bytes=int(2 * param_bytes * num_layers),
    )


def fleet_of(hosts: list[list[str]], memory: dict[str, float], *, between: float) -> Fleet:
    """Hosts that hold devices of these kinds; 200 GB/s inside, `between` bytes/s between."""
    devices = tuple(
        Device(name=f"host{h}/gpu{d}", kind=kind, memory_bytes=figure(memory[kind]))
        for h, kinds in enumerate(hosts)
        for d, kind in enumerate(kinds)
    )
    names = [f"host{h}" for h in range(len(hosts))]
    links = [Link(a=n, b=n, curve=line(1e-5, 2e11)) for n in names]
    far = line(3e-5, between)
    links += [Link(a=a, b=b, curve=far) for a, b in itertools.combinations(names, 2)]
    return Fleet(devices=devices, links=tuple(links))


def many(num_kinds: int, hosts_of_each: int, global_batch: int) -> tuple[Fleet, Profile, Job]:
    """Hosts of eight equal devices, `num_kinds` kinds, 96 layers."""
    kinds = [f"kind{i}" for i in range(num_kinds)]
    memory = {k: MEMORY[i] * GIB for i, k in enumerate(kinds)}
    fleet = fleet_of([[k] * 8 for k in kinds for _ in range(hosts_of_each)], memory, between=2e10)
    speeds = dict(zip(kinds, SPEEDS, strict=False))
    return fleet, profile_of(speeds, 96, param_bytes=400 * 2**20), Job(global_batch=global_batch)


def home(num_layers: int = 32) -> tuple[Fleet, Profile, Job]:
    """Eight devices, no two alike, on three hosts, a slow network between; the model fits none of them."""
    speeds = {f"odd{i}": s for i, s in enumerate((4.0, 3.1, 2.6, 2.0, 1.4, 1.0, 0.8, 0.5))}
    memory = {k: (24 - 2 * i) * GIB for i, k in enumerate(speeds)}
    kinds = list(speeds)
    fleet = fleet_of([kinds[:3], kinds[3:6], kinds[6:]], memory, between=1.2e8)
    return fleet, profile_of(speeds, num_layers, param_bytes=9600 / num_layers * 2**20), Job(global_batch=64)


def cuts_alone() -> dict:
    """The least slowest stage over all orders and cuts of 96 layers on any of 8 unequal devices: exact."""
    fleet, profile, job = home(96)
    tables = Tables(model=CostModel(fleet=fleet, profile=profile), groups=groups_of(fleet, profile, job))
    began = time.perf_counter()
    found = Ladder(tables, (1,) * 8, 1, 8).templates()
    seconds = time.perf_counter() - began
    best = min(found, key=lambda t: t.period_s)
    return {
        "name": CUTS,
        "devices": 8,
        "kinds": 8,
        "layers": 96,
        "seconds": seconds,
        "processor_seconds": time.process_time(),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "status": "proven",
        "predicted_step_s": best.period_s,
        "bound_step_s": best.period_s,
    }


CUTS = "cuts alone: 96 layers x 8 unequal devices"
CASES = {
    "8 odd devices at home": home,
    "8 odd devices, 96 layers": lambda: home(96),
    "3 kinds x 256": lambda: many(3, 32, 4096),
    "4 kinds x 256 in 128 hosts": lambda: many(4, 32, 8192),
}


def measure(name: str) -> dict:
    """One case, in this process."""
    fleet, profile, job = CASES[name]()
    began = time.perf_counter()
    result = plan(fleet, profile, job, shapes="all")
    seconds = time.perf_counter() - began
    prediction = result.plan.prediction
    assert prediction is not None
    return {
        "name": name,
        "devices": len(fleet.devices),
        "kinds": len({d.kind for d in fleet.devices}),
        "layers": len(profile.layers),
        "seconds": seconds,
        "processor_seconds": time.process_time(),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "status": result.status,
        "gap": result.gap,
        "predicted_step_s": prediction.step_s,
        "bound_step_s": result.bound_s,
        "used": len(result.plan.devices),
        "pipelines": len(result.plan.pipelines),
        "limiter": result.limiter,
        "alternatives": {a.name: a.step_s for a in result.alternatives},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--case", choices=(*CASES, CUTS), help="this one only, in this process")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(cuts_alone() if args.case == CUTS else measure(args.case)))
        return
    rows = []
    for name in (*CASES, CUTS):  # a process each, so that peak memory is the case's own
        done = subprocess.run(
            [sys.executable, __file__, "--case", name],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        r = rows[-1]
        print(
            f"{r['name']}: {r['seconds']:.2f} s, {r['peak_bytes'] / 2**20:.0f} MiB, "
            f"step {r['predicted_step_s']:.4g} s, bound {r['bound_step_s']:.4g} s",
            file=sys.stderr if args.json else sys.stdout,
        )
    if args.json:
        print(json.dumps({"cases": rows}))


if __name__ == "__main__":
    main()
