"""Are gradients of random plans of every shape those of a plain loop on one device?

python benchmarks/plan_shapes.py --count 120 --json
"""

import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common import Bar, finish, parser, run_processes, say
from benchmarks.shape_instances import BOUND, draw, error_of, features, run_instances
from benchmarks.shape_models import FAMILIES


def main() -> int:
    p = parser("Are gradients exact for random plans of every shape?")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--count", type=int, default=96, help="instances; each in float32 and in float64")
    p.add_argument("--only", default="", help="families, separated by commas")
    args = p.parse_args()
    families = args.only.split(",") if args.only else tuple(FAMILIES)
    worst = dict.fromkeys(BOUND, 0.0)
    met: Counter[str] = Counter()
    exact = 0
    for world_size, drawn in draw(args.seed, 16 if args.quick else args.count, families).items():
        met.update(word for instance in drawn for word in features(instance))
        right = [True] * len(drawn)
        for dtype in BOUND:
            instances = [replace(instance, dtype=dtype) for instance in drawn]
            by_rank = run_processes(run_instances, world_size, instances)
            for i, (instance, held) in enumerate(zip(instances, zip(*by_rank, strict=True), strict=True)):
                error = error_of(instance, held)
                if instance.bound == BOUND[dtype]:
                    worst[dtype] = max(worst[dtype], error)
                if not error <= instance.bound:
                    right[i] = False
                    say(f"{error:.2e}: {instance}")
        exact += sum(right)
        say(f"{world_size} processes: {sum(right)} of {len(drawn)} exact")
    instances_run = sum(met[f] for f in families)
    bars = [
        Bar(name="plans that are not exact", value=float(instances_run - exact), at_most=0.0),
        Bar(name="worst float32", value=worst["float32"], at_most=BOUND["float32"]),
        Bar(name="worst float64", value=worst["float64"], at_most=BOUND["float64"]),
    ]
    figures = {
        "instances": instances_run,
        "exact": exact,
        "worst_float32": worst["float32"],
        "worst_float64": worst["float64"],
        "seed": args.seed,
        "met": dict(met),
    }
    return finish(figures, bars, as_json=args.json)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
