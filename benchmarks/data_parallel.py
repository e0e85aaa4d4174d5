"""Uneven data parallelism against plain DDP, against shares by nominal speed, and where nothing is uneven.

    python benchmarks/data_parallel.py --json

The model is that of examples/text.py, the devices are those of examples/fleets, paced on this machine.
Devices alone and both rivals are measured in this one run.
"""

import os
import sys
from pathlib import Path
from typing import Any

from common import ROOT, TEXT, Bar, Run, finish, fleet_named, parser, say, train
from overhead import CASES, overhead
from paced import ddp_step_s, solo_samples_per_s

from evener.core.fleet import Fleet
from evener.core.split import apportion

GLOBAL_BATCH = 240  # of examples/text.py
IMAGES = ROOT / "examples" / "images.py"
IMAGES_BATCH = 96  # few samples a device, so that what a step costs at any size matters
CANDIDATES = (30, 60, 120)


def against_ddp(*, quick: bool) -> dict[str, Any]:
    """The same model and fleet of 8, 4, 2 and 2 GFLOP/s under DDP with an even split and under evener."""
    fleet = fleet_named("8-4-2-2")
    alone = _alone(fleet, quick=quick)
    ddp_s, ddp_held = ddp_step_s(str(TEXT), fleet, GLOBAL_BATCH, 3 if quick else 10)
    run = train(fleet, steps=6 if quick else 16)
    rate, ideal = run.report.samples_per_s, sum(alone.values())
    ddp_rate = GLOBAL_BATCH / ddp_s
    say(f"8:4:2:2  alone: {', '.join(f'{name} {r:.1f}' for name, r in alone.items())}, sum {ideal:.1f}")
    for who, reached in (("evener", rate), ("DDP", ddp_rate)):
        say(f"8:4:2:2  {who}: {reached:.1f} samples/s, {reached / ideal:.3f} of the sum")
    return {
        "speedup_over_ddp": rate / ddp_rate,
        "efficiency": rate / ideal,
        "ddp_efficiency": ddp_rate / ideal,
        "most_possible_speedup_over_ddp": ideal / ddp_rate,
        "samples_per_s": rate,
        "ddp_samples_per_s": ddp_rate,
        "solo_samples_per_s": alone,
        "planner_solo_samples_per_s": dict(run.plan.prediction.solo_samples_per_s),
        "samples_by_device": run.plan.samples_by_device(),
        "timings_hold": run.timings_hold and ddp_held,
        "rehearsal": run.rehearsal,
        "lost_s": run.report.lost_s,
    }


def ddp_on_equal(*, quick: bool) -> dict[str, Any]:
    """Is the rival a fair one: DDP on four equal devices, as part of what they do alone."""
    fleet = fleet_named("equal")
    alone = _alone(fleet, quick=quick)
    step_s, held = ddp_step_s(str(TEXT), fleet, GLOBAL_BATCH, 3 if quick else 10)
    rate = GLOBAL_BATCH / step_s
    say(f"equal  DDP {rate:.1f} samples/s of {sum(alone.values()):.1f}")
    return {"ddp_efficiency_on_equal": rate / sum(alone.values()), "equal_timings_hold": held}


def against_nominal_speed(script: Path, batch: int, *, quick: bool) -> dict[str, Any]:
    """Shares in proportion to the fleet file's FLOP/s, without a cost model, against the planner's."""
    fleet = fleet_named("gpu-and-cpu")
    steps = 6 if quick else 16
    planned = train(fleet, script=script, steps=steps, global_batch=batch)
    speeds = [d.flops["float32"].value for d in fleet.devices]
    shares = dict(zip((d.name for d in fleet.devices), apportion(batch, speeds), strict=True))
    naive = train(
        fleet,
        script=script,
        steps=steps,
        global_batch=batch,
        profile=planned.profile,
        batch_per_device=shares,
    )
    for who, run in (("nominal speed", naive), ("plan", planned)):
        say(f"{script.stem}, shares by {who} {_shares(run)}: {run.report.samples_per_s:.1f} samples/s")
    return {
        "speedup": planned.report.samples_per_s / naive.report.samples_per_s,
        "share_by_speed": shares,
        "share_by_plan": planned.plan.samples_by_device(),
        "timings_hold": planned.timings_hold and naive.timings_hold,
    }


def _alone(fleet: Fleet, *, quick: bool) -> dict[str, float]:
    if quick:
        return solo_samples_per_s(str(TEXT), fleet, GLOBAL_BATCH // 4, CANDIDATES[:1], 1)
    return solo_samples_per_s(str(TEXT), fleet, GLOBAL_BATCH, CANDIDATES, 2)


def _shares(run: Run) -> str:
    return ":".join(str(n) for n in run.plan.samples_by_device().values())


def main(arguments: list[str] | None = None) -> int:
    """Measure everything; 1 when a bar was missed."""
    options = parser(__doc__ or "").parse_args(arguments)
    quick = options.quick
    os.environ["EVENER_EXAMPLE_DATA"] = "digits"
    figures = against_ddp(quick=quick) | ddp_on_equal(quick=quick)
    by_speed = {
        "images": against_nominal_speed(IMAGES, IMAGES_BATCH, quick=quick),
        "text": against_nominal_speed(TEXT, GLOBAL_BATCH, quick=quick),
    }
    figures |= {"speedup_over_share_by_speed": by_speed["images"]["speedup"], "share_by_speed": by_speed}
    cases = [overhead(name, 12 if quick else 200) for name in CASES]
    worst = max(cases, key=lambda case: case["ratio"] - case["bar"])
    figures |= {"overhead_on_equal": worst["ratio"], "overhead_control": worst["control"], "overhead": cases}
    bars = [
        Bar(name="speedup_over_ddp", value=figures["speedup_over_ddp"], at_least=1.9),
        Bar(name="efficiency", value=figures["efficiency"], at_least=0.97),
        Bar(name="ddp_efficiency_on_equal", value=figures["ddp_efficiency_on_equal"], at_least=0.95),
        Bar(name="speedup_over_share_by_speed", value=figures["speedup_over_share_by_speed"], at_least=1.0),
    ]
    bars += [Bar(name=f"overhead, {c['case']}", value=c["ratio"], at_most=c["bar"]) for c in cases]
    return finish(figures, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
