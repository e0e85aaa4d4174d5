"""Two evaluators, one answer: the topological pass and the event simulator on random schedules.

    python benchmarks/simulator_agreement.py --seed 0 --count 1000 --json

Every schedule is also checked, printed and read back, and its causes must add up to the step on each device.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.random_plans import random_costs, random_plan
from evener.core.actions import parse_schedule
from evener.schedules import NAMES, check, make
from evener.sim import evaluate, simulate

FAST = tuple(name for name in NAMES if name != "unequal")


def compare(seed: int) -> float:
    """Relative difference of the two makespans on the plan of `seed`; AssertionError on any other flaw."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    costs = random_costs(rng, plan)
    name = "unequal" if rng.random() < 0.03 else rng.choice(FAST)
    schedule = make(plan, name=name, costs=costs)
    assert check(schedule, plan) == [], (seed, name)
    assert parse_schedule(str(schedule)) == schedule, (seed, name)
    quick, slow = evaluate(schedule, plan, costs), simulate(schedule, plan, costs)
    for outcome in (quick, slow):
        for device in plan.devices:
            whole = sum(outcome.trace.seconds_by_cause(device).values())
            assert abs(whole - outcome.step_s) <= 1e-9 * outcome.step_s, (seed, name, device)
    return abs(quick.step_s - slow.step_s) / quick.step_s


def main() -> None:
    """Compare `--count` schedules from `--seed` on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    start = time.perf_counter()
    worst = max(compare(args.seed + i) for i in range(args.count))
    seconds = time.perf_counter() - start
    print(
        f"{args.count} random schedules: largest relative difference {worst:.1e} ({seconds:.1f} s)",
        file=sys.stderr,
    )
    if args.json:
        print(json.dumps({"schedules": args.count, "worst_difference": worst, "seconds": seconds}))
    sys.exit(0 if worst <= 1e-9 else 1)


if __name__ == "__main__":
    main()
