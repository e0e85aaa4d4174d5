"""What a schedule made for unequal stages saves, on fleets whose stage times cannot be balanced.

    python benchmarks/unequal_schedule.py --seed 0 --count 24 --json

A fleet has 3 to 5 devices of random speeds; the model has few thick layers, 1 to 3 more than devices.
All three schedules run the same plan: one stage a device, cut and ordered so that 1F1B is as short as it
can be. A device has memory for 1 to 3 times as many micro-batches as there are stages; zero-bubble needs 1
times as many, and `--room 1` gives every device just that.

Bubble share: the part of all devices' time in which they compute nothing, by the event simulator's trace. It
holds what no order can avoid, too: with one stage a device, those that are quicker than the slowest idle.
"""

import argparse
import itertools
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evener.core.figures import line
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.schedules import check, make
from evener.schedules.costs import Costs, Memory, Wire
from evener.sim import simulate

NAMES = ("1f1b", "zero-bubble", "unequal")


@dataclass(frozen=True, kw_only=True)
class Instance:
    """Layers' seconds on a device of speed 1 (a third is forward), devices' speeds, micro-batches."""

    layers: tuple[float, ...]
    speeds: tuple[float, ...]
    num_micro_batches: int
    send_s: float
    room: tuple[float, ...]


def instance(seed: int, room: float | None = None) -> Instance:
    """A random fleet and model; the same seed gives the same one. `room` is the same for all where given."""
    rng = random.Random(seed)
    num_devices = rng.randint(3, 5)
    layers = tuple(rng.uniform(1, 4) for _ in range(num_devices + rng.randint(1, 3)))
    return Instance(
        layers=layers,
        speeds=tuple(rng.choice((1.0, 1.5, 2.0, 3.0, 4.0)) for _ in range(num_devices)),
        num_micro_batches=num_devices * rng.randint(1, 3),
        send_s=0.02 * sum(layers) / len(layers),
        room=tuple(room or rng.uniform(1, 3) for _ in range(num_devices)),
    )


def best_cut(given: Instance) -> list[tuple[int, int]]:
    """(device, layers) of each stage: the order and cut with the least Σ t + (m - 1)·max t."""
    count = len(given.speeds)
    best: tuple[float, list[tuple[int, int]]] = (float("inf"), [])
    for cuts in itertools.combinations(range(1, len(given.layers)), count - 1):
        edges = list(itertools.pairwise((0, *cuts, len(given.layers))))
        for order in itertools.permutations(range(count)):
            times = [sum(given.layers[a:b]) / given.speeds[d] for d, (a, b) in zip(order, edges, strict=True)]
            seconds = sum(times) + (given.num_micro_batches - 1) * max(times)
            if seconds < best[0]:
                best = (seconds, [(d, b - a) for d, (a, b) in zip(order, edges, strict=True)])
    return best[1]


def planned(given: Instance, stages: list[tuple[int, int]]) -> tuple[Plan, Costs]:
    """The plan with these (device, number of layers) and its costs."""
    names = [f"layer{i}" for i in range(len(given.layers))]
    built, compute, at = [], {}, 0
    for number, (device, length) in enumerate(stages):
        name = f"home/{device}"
        built.append(
            Stage(layers=tuple(names[at : at + length]), shares=(Share(devices=(name,), samples=1),))
        )
        third = sum(given.layers[at : at + length]) / given.speeds[device] / 3
        for kind, thirds in (("F", 1), ("I", 1), ("W", 1), ("B", 2)):
            compute[number, name, kind, 1] = thirds * third
        at += length
    m = given.num_micro_batches
    plan = Plan(global_batch=m, pipelines=(Pipeline(samples=m, micro_batch=1, stages=tuple(built)),))
    wire = Wire(curve=line(given.send_s, 1e9))
    weight = {number: float(length) for number, (_, length) in enumerate(stages)}
    memory = {}
    for name in plan.devices:
        held = {n: weight[n] for n, s in enumerate(built) if s.shares[0].devices == (name,)}
        room = given.room[int(name.removeprefix("home/"))] * len(stages)
        memory[name] = Memory(limit_bytes=room * sum(held.values()), saved_bytes=held)
    pairs = {(a, b): wire for a in plan.devices for b in plan.devices if a != b}
    return plan, Costs(compute_s=compute, wires=pairs, memory=memory)


def bubble_share(given: Instance, plan: Plan, costs: Costs, name: str) -> float:
    """Idle seconds over all seconds of all devices of the fleet, used or not."""
    schedule = make(plan, name=name, costs=costs)
    assert check(schedule, plan) == []
    outcome = simulate(schedule, plan, costs)
    limits = {d: m.limit_bytes for d, m in costs.memory.items()}
    over = [d for d, peak in outcome.peak_bytes.items() if peak > (limits[d] or 0) * (1 + 1e-9)]
    assert not over, f"{name} goes over the memory of {', '.join(over)}"
    busy = sum(outcome.trace.seconds_by_cause(d)["compute"] for d in plan.devices)
    return 1 - busy / (outcome.step_s * len(given.speeds))


def row(seed: int, room: float | None = None) -> dict:
    """The figures of one instance."""
    given = instance(seed, room)
    stages = best_cut(given)
    plan, costs = planned(given, stages)
    shares = {name: bubble_share(given, plan, costs, name) for name in NAMES}
    times = [sum(costs.compute_s[s, f"home/{d}", k, 1] for k in "FB") for s, (d, _) in enumerate(stages)]
    return {
        "seed": seed,
        "devices": len(given.speeds),
        "layers": len(given.layers),
        "micro_batches": given.num_micro_batches,
        "balance": sum(times) / len(times) / max(times),
        "bubble_share": shares,
        "reduction": 1 - shares["unequal"] / shares["1f1b"],
    }


def main() -> None:
    """Print the instances side by side; exit 1 when worse anywhere or not a third lower in the median."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--room", type=float, help="memory of every device, in micro-batches a stage")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    start = time.perf_counter()
    head = ("seed", "dev", "lay", "m", "balance", "1f1b", "zb", "unequal", "lower by")
    print(" ".join(f"{word:>7}" for word in head), file=sys.stderr)
    rows = []
    for seed in range(args.seed, args.seed + args.count):
        r = row(seed, args.room)
        rows.append(r)
        counts = (seed, r["devices"], r["layers"], r["micro_batches"])
        shares = (r["balance"], *r["bubble_share"].values())
        text = [f"{n:>7}" for n in counts] + [f"{x:>7.3f}" for x in shares] + [f"{r['reduction']:>7.1%}"]
        print(" ".join(text), file=sys.stderr)
    worse = sum(r["bubble_share"]["unequal"] > min(r["bubble_share"].values()) + 1e-9 for r in rows)
    lower = median(r["reduction"] for r in rows)
    beats = sum(r["bubble_share"]["unequal"] < r["bubble_share"]["zero-bubble"] - 1e-6 for r in rows)
    print(
        f"median {lower:.1%} lower than 1F1B; worse than one of the others on {worse} of {len(rows)}; "
        f"better than zero-bubble on {beats}",
        file=sys.stderr,
    )
    if args.json:
        medians = {n: median(r["bubble_share"][n] for r in rows) for n in NAMES}
        figures = {
            "instances": len(rows),
            "worse": worse,
            "better_than_zero_bubble": beats,
            "median_reduction": lower,
            "median_bubble_share": medians,
            "seconds": time.perf_counter() - start,
            "rows": rows,
        }
        print(json.dumps(figures))
    sys.exit(0 if not worse and lower >= 1 / 3 else 1)


if __name__ == "__main__":
    main()
