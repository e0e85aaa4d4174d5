"""A host's CPU beside an accelerator: where its share pays, where it does not, and whether the planner knows.

    python benchmarks/cpu_share.py --json

One rehearsed accelerator and the CPU of its host, the text example. Each fleet is measured with the CPU (it
must take part) and without it, in the same micro-batches' profile; the planner, which is free to leave it
out, must choose the faster of the two. With a fast CPU on a quick link it takes part; where it is so slow
that one sample takes it longer than the accelerator needs for all, or the link so slow that summing the
gradients costs more than it saves, it is left out, and the plan says with which sum.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common import TEXT, Bar, finish, parser, say, train
from evener.core.figures import Figure, line
from evener.core.fleet import Device, Fleet, Link
from evener.core.job import Job
from evener.planner import plan

GPU, CPU = "lab/gpu0", "lab/cpu"
GLOBAL_BATCH, STEPS = 48, 8
CARD_FLOPS = 4e9
FLEETS = {  # FLOP/s of the CPU, bytes/s of the link
    "a quick CPU": (1.5e9, 1e9),
    "a slow CPU": (0.05e9, 1e9),
    "a slow link": (1.5e9, 1.5e6),
}
PAYS = {"a quick CPU": True, "a slow CPU": False, "a slow link": False}
PREDICTED_WITHIN = 0.05


def fleet_of(cpu_flops: float, bytes_per_s: float) -> Fleet:
    """An accelerator and the CPU of its host."""

    def device(name: str, kind: str, flops: float, rate: float) -> Device:
        return Device(
            name=name,
            kind=f"{kind}, {flops / 1e9:g} GFLOP/s",
            type="cpu" if name == CPU else "cuda",
            threads=1 if name == CPU else None,
            memory_bytes=Figure(value=8e9, source="assumed"),
            flops={"float32": Figure(value=flops, source="assumed")},
            bytes_per_s=Figure(value=rate, source="assumed"),
        )

    devices = (device(GPU, "accelerator", CARD_FLOPS, 200e9), device(CPU, "CPU", cpu_flops, 20e9))
    link = Link(a="lab", b="lab", curve=line(1e-4, bytes_per_s))
    return Fleet(devices=devices, links=(link,)).as_rehearsed()


def compared(name: str, steps: int) -> tuple[dict[str, Any], list[Bar]]:
    """Steps with and without the CPU, and what the planner says of it."""
    fleet = fleet_of(*FLEETS[name])
    wishes: dict[str, Any] = {"script": TEXT, "global_batch": GLOBAL_BATCH, "steps": steps, "adapt": False}
    both = train(fleet, keep_all=True, profile_s=12.0, **wishes)
    alone = train(fleet.only((GPU,)), profile=both.profile, **wishes)
    free = plan(fleet, both.profile, Job(global_batch=GLOBAL_BATCH, allow=("unlinked",))).plan
    uses = CPU in free.devices
    chosen, other = (both, alone) if uses else (alone, both)
    told = free.prediction
    assert told is not None
    reason = next((x.reason for x in free.left_out if x.device == CPU), "it takes part")
    say(
        f"{name}: {both.report.step_s * 1e3:.0f} ms with the CPU "
        f"({both.plan.samples_by_device()[CPU]} of {GLOBAL_BATCH} samples), "
        f"{alone.report.step_s * 1e3:.0f} ms without; planner: {reason}"
    )
    figures = {
        "with_cpu_s": both.report.step_s,
        "without_cpu_s": alone.report.step_s,
        "samples_of_cpu": both.plan.samples_by_device()[CPU],
        "planner_uses_cpu": uses,
        "planner_says": reason,
        "predicted_s": told.step_s,
        "timings_hold": both.timings_hold and alone.timings_hold,
    }
    over, off = other.report.step_s / chosen.report.step_s, abs(told.step_s / chosen.report.step_s - 1)
    kept = float(figures["timings_hold"])
    bars = [
        Bar(name=f"{name}: the other over the planner's choice", value=over, at_least=1.0),
        Bar(name=f"{name}: prediction off by", value=off, at_most=PREDICTED_WITHIN),
        Bar(name=f"{name}: the CPU takes part as it should", value=float(uses == PAYS[name]), at_least=1.0),
        Bar(name=f"{name}: the devices kept their clocks", value=kept, at_least=1.0),
    ]
    return figures, bars


def main(args: argparse.Namespace) -> int:
    """All fleets, or those that are named."""
    steps = 3 if args.quick else STEPS
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    for name in args.only or FLEETS:
        figures[name], own = compared(name, steps)
        bars += own
    return finish(figures, bars, as_json=args.json)


if __name__ == "__main__":
    options = parser(__doc__ or "")
    options.add_argument("--only", action="append", choices=list(FLEETS), help="One of the fleets.")
    sys.exit(main(options.parse_args()))
