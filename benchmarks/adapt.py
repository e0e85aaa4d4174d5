"""A device that slows down in mid-run, and devices whose actions now and then take far longer.

    python benchmarks/adapt.py --json

The text example on examples/fleets/8-4-2-2.json, paced. `slow`: one device becomes three times slower; runs
with and without adaptation, one that steals as well, and one whose shares were made for the slow device from
the start: the new optimum, measured. `noise`: the time of every action is drawn with a heavy tail; fixed
shares as the planner makes them, fixed shares in the small micro-batches of stealing, and stealing. `calm`:
± 5 % noise on the seconds of 10,000 steps moves no sample.
"""

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from common import TEXT, Bar, finish, fleet_named, parser, say
from msgspec.structs import replace

from evener.core.faults import parse_faults
from evener.core.figures import Value
from evener.core.files import read
from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.planner import plan as make_plan
from evener.policy.adapt import Situation, decide_shares, least_gain
from evener.policy.estimate import Estimates, updated
from evener.policy.shares import for_stealing
from evener.session.checkpoints.tensors import first_gradients
from evener.session.launching.launch import launch
from evener.session.request import Request

GLOBAL_BATCH, NOISY_BATCH = 120, 240  # of the example: 240
SLOW_AT, FACTOR = 6, 3
WITHIN = 3  # steps, after which throughput must be back
WARM_UP = 3


class Seen(Value, frozen=True, kw_only=True):
    """Seconds of each step of a run, what was decided, and whether the rehearsal kept its clocks."""

    step_s: tuple[float, ...]
    decisions: tuple[str, ...]
    timings_hold: bool
    rehearsal: str
    profile: Profile | None = None
    gradient: dict[str, list[float]] = {}


def rehearsed(fleet: Fleet, steps: int, batch: int = GLOBAL_BATCH, **wishes: Any) -> Seen:
    """A paced run of the text example."""
    with tempfile.TemporaryDirectory(prefix="evener-benchmark-") as folder:
        request = Request(
            script=str(TEXT),
            fleet=fleet,
            rehearse=True,
            run_dir=folder,
            steps=steps,
            global_batch=batch,
            evaluate=False,
            quiet=True,
            **wishes,
        )
        outcome = launch(request)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        made = Path(folder) / "profile.json"
        gradients = first_gradients(Path(folder)) if request.keep_gradient else [{}]
        if not outcome.timings_hold:
            say(f"WARNING: {outcome.rehearsal}")
        return Seen(
            step_s=tuple(json.loads(line)["step_s"] for line in lines),
            decisions=outcome.decisions,
            timings_hold=outcome.timings_hold,
            rehearsal=outcome.rehearsal,
            profile=read(made, Profile) if made.exists() else None,
            gradient={n: t.flatten().tolist() for n, t in gradients[0].items()},
        )


def slow_down(fleet: Fleet, profile: Profile, device: str, *, steps: int) -> dict[str, Any]:
    """One device three times slower from step `SLOW_AT` on: with adaptation, without, and the new optimum."""
    job = Job(global_batch=GLOBAL_BATCH, allow=("unlinked",))
    slowed = Situation(fleet=fleet, profile=profile, job=job).slowed({device: FACTOR})
    best = make_plan(slowed.fleet, slowed.profile, job).plan
    script = parse_faults(f"slow {device} x{FACTOR} at step {SLOW_AT}")
    at_once = parse_faults(f"slow {device} x{FACTOR} at step 0")
    known = rehearsed(fleet, steps - SLOW_AT, plan=best, faults=at_once, adapt=False)
    optimum_s = median(known.step_s[WARM_UP:])
    ways = {
        "adapting": {"adapt": True},
        "fixed": {"adapt": False},
        "adapting and stealing": {"adapt": True, "steal": True},
    }
    runs = {
        name: rehearsed(fleet, steps, profile=profile, faults=script, **way) for name, way in ways.items()
    }
    back_s = runs["adapting"].step_s[SLOW_AT + WITHIN - 1 :]
    say(f"{device} x{FACTOR} at step {SLOW_AT}, new optimum {optimum_s:.3f} s:")
    for name, run in runs.items():
        told = ", ".join(f"{s:.3f}" for s in run.step_s[SLOW_AT - 1 : SLOW_AT + WITHIN + 1])
        say(f"  {name}: steps of {told} s")
    for decision in runs["adapting"].decisions:
        say(f"  {decision}")
    return {
        "device": device,
        "optimum_s": optimum_s,
        "before_s": median(runs["adapting"].step_s[WARM_UP:SLOW_AT]),
        "step_s": {name: run.step_s for name, run in runs.items()},
        "worst_over_optimum": max(back_s) / optimum_s,
        "median_over_optimum": median(back_s) / optimum_s,
        "fixed_over_optimum": median(runs["fixed"].step_s[SLOW_AT + WITHIN - 1 :]) / optimum_s,
        "decisions": runs["adapting"].decisions,
        "timings_hold": all(run.timings_hold for run in (*runs.values(), known)),
    }


def noisy(fleet: Fleet, profile: Profile, noise: float, seed: int, *, steps: int) -> dict[str, Any]:
    """Heavy-tailed noise on the planner's shares, on the same in small micro-batches, and on stealing."""
    job = Job(global_batch=NOISY_BATCH, allow=("unlinked",))
    usual = make_plan(fleet, profile, job).plan
    small = for_stealing(usual, fleet, profile, job)
    wishes = {"profile": profile, "noise": noise, "seed": seed, "adapt": False, "keep_gradient": True}
    plans = {"fixed": usual, "fixed, small": replace(small, steal=False), "stealing": small}
    runs = {name: rehearsed(fleet, steps, NOISY_BATCH, plan=plan, **wishes) for name, plan in plans.items()}
    parts = {name: run.step_s[WARM_UP:] for name, run in runs.items()}
    assert small.prediction is not None
    say(f"noise {noise:g}, seed {seed}; undisturbed {small.prediction.step_s:.3f} s a step, predicted:")
    for name, step_s in parts.items():
        say(f"  {name}: median {median(step_s):.3f} s, mean {mean(step_s):.3f} s")
    return {
        "noise": noise,
        "seed": seed,
        "median_speedup": median(parts["fixed"]) / median(parts["stealing"]),
        "mean_speedup": mean(parts["fixed"]) / mean(parts["stealing"]),
        "median_speedup_small": median(parts["fixed, small"]) / median(parts["stealing"]),
        "mean_speedup_small": mean(parts["fixed, small"]) / mean(parts["stealing"]),
        "step_s": parts,
        "undisturbed_predicted_s": small.prediction.step_s,
        "micro_batches": {
            name: {p.devices[0]: f"{p.samples} in {p.micro_batch}" for p in plan.pipelines}
            for name, plan in plans.items()
        },
        "gradient_distance": _distance(runs["stealing"].gradient, runs["fixed"].gradient),
        "decisions": runs["stealing"].decisions,
        "timings_hold": all(run.timings_hold for run in runs.values()),
    }


def _distance(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    """‖a - b‖ / ‖b‖ over all parameters, in float64."""
    a, b = (torch.cat([torch.tensor(g[n], dtype=torch.float64) for n in sorted(other)]) for g in (one, other))
    return float((a - b).norm() / b.norm())


def calm(fleet: Fleet, profile: Profile, seeds: Sequence[int], *, steps: int) -> int:
    """Changes of plan that ± 5 % noise on every device's seconds makes."""
    job = Job(global_batch=GLOBAL_BATCH, allow=("unlinked",))
    now, changes = Situation(fleet=fleet, profile=profile, job=job), 0
    for seed in seeds:
        rng, estimates, moves = random.Random(seed), Estimates(), []
        plan: Plan = make_plan(fleet, profile, job).plan
        for step in range(steps):
            seen = {name: 1 + rng.uniform(-0.05, 0.05) for name in plan.devices}
            estimates, changed = updated(estimates, seen)
            if changed:
                decision = decide_shares(plan, now, estimates.factors, least_gain(moves, step))
                if decision.do != "keep":
                    moves.append(step)
                    plan = decision.plan
        changes += len(moves)
    return changes


def main(arguments: list[str] | None = None) -> int:
    """Measure what was asked for; 1 when a bar was missed."""
    p = parser(__doc__ or "")
    p.add_argument("--only", default="slow,noise,calm", help="some of slow,noise,calm")
    p.add_argument("--devices", default="lab1/a,lab1/c", help="which become slow, one after the other")
    p.add_argument("--noise", type=float, default=1.0, help="see rehearsal/trouble.py")
    p.add_argument("--seeds", default="1,0,2", help="of the noise: three runs each")
    options = p.parse_args(arguments)
    fleet, chosen = fleet_named("8-4-2-2"), options.only.split(",")
    measured = rehearsed(fleet, WARM_UP + 1, NOISY_BATCH)
    profile = measured.profile
    assert profile is not None
    figures: dict[str, Any] = {}
    bars = []
    if "slow" in chosen:
        devices = options.devices.split(",")[: 1 if options.quick else None]
        steps = SLOW_AT + WITHIN + (2 if options.quick else 8)
        figures["slow"] = [slow_down(fleet, profile, name, steps=steps) for name in devices]
        for case in figures["slow"]:
            name = f"{case['device']} slow: step over the new optimum"
            bars += [
                Bar(
                    name=f"{name}, median from the third on", value=case["median_over_optimum"], at_most=1.05
                ),
                Bar(name=f"{name}, worst from the third on", value=case["worst_over_optimum"], at_most=1.05),
            ]
    if "noise" in chosen:
        seeds = [int(seed) for seed in options.seeds.split(",")][: 1 if options.quick else None]
        steps = WARM_UP + (3 if options.quick else 16)
        figures["noise"] = [noisy(fleet, profile, options.noise, seed, steps=steps) for seed in seeds]
        speedups = [case["median_speedup"] for case in figures["noise"]]
        small = [case["median_speedup_small"] for case in figures["noise"]]
        distances = [case["gradient_distance"] for case in figures["noise"]]
        figures |= {"stealing_speedup": median(speedups), "gradient_distance": max(distances)}
        figures["stealing_speedup_in_the_same_micro_batches"] = median(small)
        bars += [
            Bar(name="stealing over fixed shares", value=median(speedups), at_least=1.1),
            Bar(name="gradients apart (float32)", value=max(distances), at_most=1e-6),
        ]
    if "calm" in chosen:
        steps = 200 if options.quick else 10_000
        figures["changes_by_noise"] = calm(fleet, profile, range(5), steps=steps)
        bars.append(Bar(name="changes by ± 5 % noise", value=figures["changes_by_noise"], at_most=0))
    return finish(figures, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
