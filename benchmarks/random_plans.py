"""Random plans of every shape, and costs for them: what schedules and simulator are tried on."""

import random
from itertools import pairwise

from evener.core.figures import line
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.routes import Routes
from evener.schedules.costs import Costs, Memory, Reduction, Wire


def stage(layers: str, *shares: tuple[str, int]) -> Stage:
    """A stage of one-letter layers. Example: stage("ab", ("h/0", 3), ("h/1", 1)) is shared 3 to 1."""
    return Stage(
        layers=tuple(layers),
        shares=tuple(Share(devices=(name,), samples=samples) for name, samples in shares),
    )


def random_plan(rng: random.Random, max_devices: int = 4) -> Plan:
    """Pipelines with cuts of their own; devices may hold several stages, stages several shares."""
    devices = [f"h{i % 2}/{i}" for i in range(rng.randint(1, max_devices))]
    layers = "abcdef"[: rng.randint(1, 6)]
    pipelines = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        micro_batch = rng.randint(1, 4)
        cuts = sorted(rng.sample(range(1, len(layers)), k=rng.randint(0, min(4, len(layers) - 1))))
        edges = [0, *cuts, len(layers)]
        stages = []
        for low, high in pairwise(edges):
            count = rng.randint(1, min(micro_batch, len(devices), 2))
            parts = [micro_batch // count + (i < micro_batch % count) for i in range(count)]
            stages.append(stage(layers[low:high], *zip(rng.sample(devices, count), parts, strict=True)))
        samples = rng.randint(1, 6) * micro_batch - rng.randint(0, micro_batch - 1)
        pipelines.append(Pipeline(samples=samples, micro_batch=micro_batch, stages=tuple(stages)))
    return Plan(global_batch=sum(p.samples for p in pipelines), pipelines=tuple(pipelines))


def random_costs(rng: random.Random, plan: Plan) -> Costs:
    """Unequal seconds for everything, some wires without delay, reductions for what several devices hold."""
    routes = Routes(plan)
    compute, inputs = {}, {}
    for device in routes.devices:
        speed = rng.choice((1.0, 1.0, 2.0, 4.0))
        for number, m in routes.work(device):
            n = routes.samples(number, device, m)
            forward, inward, weight = (rng.uniform(0.5, 2.0) * n / speed for _ in range(3))
            seconds = {"F": forward, "I": inward, "W": weight, "B": inward + weight}
            compute |= {(number, device, kind, n): s for kind, s in seconds.items()}
            if routes.stages[number].is_first and rng.random() < 0.3:
                inputs[number, device, n] = 0.1
    wires = {
        (a, b): Wire(curve=line(rng.choice((1e-6, 0.3)), rng.choice((1e3, 1e9))))
        if rng.random() < 0.8
        else Wire()
        for a in routes.devices
        for b in routes.devices
        if a != b
    }
    return Costs(
        compute_s=compute,
        output_bytes={r.number: rng.choice((0.0, 100.0, 1000.0)) for r in routes.stages},
        wires=wires,
        reductions=random_reductions(rng, routes),
        input_s=inputs,
        update_s={d: rng.choice((0.0, 0.2)) for d in routes.devices},
        overhead_s={d: rng.choice((0.0, 0.1)) for d in routes.devices},
        agree_s=rng.choice((0.0, 0.05)),
        memory={
            d: Memory(saved_bytes={r.number: 10.0 for r in routes.stages if d in r.devices})
            for d in routes.devices
        },
    )


def random_reductions(rng: random.Random, routes: Routes) -> tuple[Reduction, ...]:
    """One reduction per layer that several devices hold, later layers first."""
    names = [n for s in routes.plan.pipelines[0].stages for n in s.layers]
    found = []
    for name in reversed(names):
        holders = tuple((r.number, d) for r in routes.stages if name in r.stage.layers for d in r.devices)
        if len({d for _, d in holders}) > 1:
            pieces = tuple(
                (rng.uniform(0.01, 0.5), tuple(rng.uniform(0, last) for _ in holders)) for last in (0.4, 1.0)
            )
            found.append(Reduction(layers=(name,), holders=holders, pieces=pieces))
    return tuple(found)
