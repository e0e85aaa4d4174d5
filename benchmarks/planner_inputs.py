"""What the planner makes of published layer times: three models on fleets of mixed kinds.

    python benchmarks/planner_inputs.py --data ../shared/published/kinds.json --json

No runs stand behind these: the question is whether real profiles, with their holes and odd entries, give a
plan, how fast, and how near to a bound. Estimated layer times and links are said per case. Never imports
torch.
"""

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.published import CONSTANTS, Constants
from benchmarks.published_data import Published, read_published
from benchmarks.published_rows import Overheads, corrected, reaching
from evener.core.figures import Figure
from evener.core.files import read
from evener.core.fleet import Device, Fleet, Link
from evener.core.job import Job
from evener.errors import EvenerError
from evener.planner import plan

MEMORY = {"A100-40": 40e9, "A100-80": 80e9, "V100-16": 16e9, "GH-96": 96e9}
"""Bytes of the devices, by the numbers in the kinds' names."""
DEVICES_IN_A_HOST = 4
FLEETS = {
    "one host A100-40, one V100-16": {"A100-40": 1, "V100-16": 1},
    "two hosts A100-40, two A100-80, two V100-16, one GH-96": {
        "A100-40": 2,
        "A100-80": 2,
        "V100-16": 2,
        "GH-96": 1,
    },
    "sixteen hosts of each kind": dict.fromkeys(MEMORY, 16),
}
BATCHES = {"LLAMA-3-8": 64}
BATCH = 512
SHOWN = (
    "status",
    "gap",
    "predicted_step_s",
    "bound_step_s",
    "used",
    "pipelines",
    "limiter",
    "why",
    "alternatives",
)


def fleet_of(published: Published, hosts: dict[str, int], overheads: Overheads, notes: dict) -> Fleet:
    """Hosts of four; each pair of hosts shares one link, of which a message alone has all."""
    names = [(f"{kind}-{n}", kind) for kind, count in hosts.items() for n in range(count)]
    framework = Figure(value=overheads.framework_bytes, source="fitted")
    devices = tuple(
        Device(
            name=f"{host}/gpu{i}",
            kind=kind,
            memory_bytes=Figure(value=MEMORY[kind], source="table"),
            framework_bytes=framework,
        )
        for host, kind in names
        for i in range(DEVICES_IN_A_HOST)
    )
    curves: dict[tuple, Any] = {}
    links = []
    for (a, first), (b, second) in itertools.combinations_with_replacement(names, 2):
        key = (first, second, a == b)
        if key not in curves:
            curves[key], note = published.curve((first, 1), (second, 1), inside=a == b)
            notes |= {note: None} if note else {}
        links.append(Link(a=a, b=b, curve=curves[key], bus=None if a == b else f"{a}|{b}"))
    return Fleet(devices=devices, links=tuple(links))


def case(published: Published, model: str, name: str, overheads: Overheads) -> dict[str, Any]:
    """One model on one fleet: the plan in numbers, or why there is none."""
    hosts, notes = FLEETS[name], {}
    fleet = fleet_of(published, hosts, overheads, notes)
    made: dict[str, Any] = {"model": model, "fleet": name, "devices": len(fleet.devices)}
    began = time.perf_counter()
    try:
        profile = corrected(published.profile(model, list(hosts)), overheads, list(hosts))
        for kind in hosts:
            for note, degree in published.notes.get((model, kind), {}).items():
                notes |= {f"{kind}: {note}": None} if degree < 2 else {}
        profile = reaching(profile, [(kind, 1) for kind in hosts], 1, notes)
        job = Job(global_batch=BATCHES.get(model, BATCH))
        result = plan(fleet, profile, job, shapes="all")
    except EvenerError as e:
        made |= {"status": e.code, "why": f"{e.what}; {e.numbers}", "seconds": time.perf_counter() - began}
        return made | {"notes": list(notes)}
    used = Counter(fleet.device(d).kind for d in result.plan.devices)
    prediction = result.plan.prediction
    assert prediction is not None
    shapes = Counter(f"{len(p.stages)} stages, micro-batch {p.micro_batch}" for p in result.plan.pipelines)
    return made | {
        "global_batch": job.global_batch,
        "seconds": time.perf_counter() - began,
        "status": result.status,
        "gap": result.gap,
        "predicted_step_s": prediction.step_s,
        "bound_step_s": result.bound_s,
        "samples_per_s": job.global_batch / prediction.step_s,
        "used": dict(used),
        "pipelines": dict(shapes),
        "limiter": result.limiter,
        "alternatives": {a.name: a.step_s for a in result.alternatives},
        "notes": [*notes, *result.reasons],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every case has a plan or a reason why none fits, 1 when one failed otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="file of layer times and links")
    parser.add_argument("--model", help="only this one")
    parser.add_argument("--fleet", choices=FLEETS, help="only this one")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    out = sys.stderr if args.json else sys.stdout
    try:
        published = read_published(args.data)
        overheads = read(CONSTANTS, Constants).overheads
    except EvenerError as e:
        print(e, file=sys.stderr)
        return e.exit_code
    cases = []
    for model in [args.model] if args.model else published.models:
        for name in [args.fleet] if args.fleet else FLEETS:
            made = case(published, model, name, overheads)
            cases.append(made)
            print(f"{model} on {name} ({made['devices']} devices): {made['seconds']:.1f} s", file=out)
            for key in SHOWN:
                if key in made:
                    print(f"    {key}: {made[key]}", file=out)
            for note in made["notes"]:
                print(f"    {note}", file=out)
    if args.json:
        print(json.dumps({"cases": cases}))
    return int(any(c["status"] not in ("proven", "within", "time limit", "EV201") for c in cases))


if __name__ == "__main__":
    sys.exit(main())
