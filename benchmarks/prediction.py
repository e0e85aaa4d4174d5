"""Predicted step time beside measured step time, on every fleet of examples/fleets and unpaced on this host.

    python benchmarks/prediction.py --json [--only straggler,equal]

Each fleet gets a profile, a plan and a run of its own. A rehearsal paces by figures that the planner does
not see, though both know the links; the unpaced run, on two real processes of one and two threads, shares
nothing. Beside it: is the job as fast as its best device alone, and is a straggler rightly left out?
"""

import sys
from typing import Any

from common import FLEETS, Bar, Run, finish, fleet_named, parser, say, train

from evener.core.fleet import Device, Fleet
from evener.probing.identity import host_name

STRAGGLER, UNPACED = "straggler", "unpaced"
MOST_ERROR, MOST_ERROR_UNPACED = 0.03, 0.10


def rehearsed(name: str, steps: int) -> dict[str, Any]:
    """The run on fleet `name`, and on its best device alone."""
    fleet = fleet_named(name)
    run = train(fleet, steps=steps)
    figures = _compared(name, run) | _best_alone(fleet, run, max(5, steps // 2), rehearse=True)
    if name == STRAGGLER:
        kept = train(fleet, steps=steps, profile=run.profile, keep_all=True)
        figures["speedup_by_leaving_out"] = kept.report.step_s / run.report.step_s
        figures["kept_step_s"] = kept.report.step_s
        say(f"{name}: with every device kept a step takes {_ms(kept.report.step_s)}")
    return figures


def unpaced(steps: int) -> dict[str, Any]:
    """Two real devices of this host, a CPU process of one thread and one of two."""
    host = host_name()
    devices = (
        Device(name=f"{host}/one", kind="cpu, 1 thread", threads=1),
        Device(name=f"{host}/two", kind="cpu, 2 threads", threads=2),
    )
    fleet = Fleet(devices=devices)
    run = train(fleet, rehearse=False, steps=steps)
    return _compared(UNPACED, run) | _best_alone(fleet, run, max(5, steps // 2), rehearse=False)


def _compared(name: str, run: Run) -> dict[str, Any]:
    report, predicted = run.report, run.plan.prediction
    assert predicted is not None
    error = abs(predicted.step_s - report.step_s) / report.step_s
    say(
        f"{name}: predicted {_ms(predicted.step_s)} ({_ms(predicted.lower_s)} to {_ms(predicted.upper_s)}), "
        f"measured {_ms(report.step_s)} ±{report.spread:.1%}, error {error:.2%}, "
        f"efficiency {report.efficiency:.3f}"
    )
    return {
        "prediction_error": error,
        "predicted_step_s": predicted.step_s,
        "lower_step_s": predicted.lower_s,
        "upper_step_s": predicted.upper_s,
        "step_s": report.step_s,
        "spread": report.spread,
        "efficiency": report.efficiency,
        "samples_by_device": run.plan.samples_by_device(),
        "micro_batches": {p.devices[0]: p.micro_batch for p in run.plan.pipelines},
        "left_out": [x.device for x in run.plan.left_out],
        "predicted_s": predicted.seconds,
        "measured_s": {d.name: d.seconds for d in report.devices},
        "timings_hold": run.timings_hold,
        "rehearsal": run.rehearsal,
    }


def _best_alone(fleet: Fleet, run: Run, steps: int, *, rehearse: bool) -> dict[str, Any]:
    assert run.plan.prediction is not None
    solo = run.plan.prediction.solo_samples_per_s
    best = max(solo, key=lambda name: solo[name])
    alone = train(fleet.only((best,)), rehearse=rehearse, steps=steps, profile=run.profile).report
    ratio = alone.step_s / run.report.step_s
    say(f"  {best} alone: {_ms(alone.step_s)} a step, so all together are {ratio:.3f} times as fast")
    return {"best_device": best, "speedup_over_best_device": ratio}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def main(arguments: list[str] | None = None) -> int:
    """Measure every fleet asked for; 1 when a bar was missed."""
    options = parser(__doc__ or "")
    options.add_argument("--only", default="", help="these fleets (or unpaced), with commas between")
    chosen = options.parse_args(arguments)
    names = [*sorted(p.stem for p in FLEETS.glob("*.json")), UNPACED]
    wanted = [w for w in chosen.only.split(",") if w] or names
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        say(f"no fleet {', '.join(unknown)}; there are {', '.join(names)}")
        return 2
    found = {}
    for name in wanted:
        if name == UNPACED:
            found[name] = unpaced(6 if chosen.quick else 30)
        else:
            found[name] = rehearsed(name, 6 if chosen.quick else 15)
    errors = {name: figures["prediction_error"] for name, figures in found.items()}
    unpaced_error = errors.pop(UNPACED, None)
    summary = {
        "prediction_error": max(errors.values(), default=None),
        "prediction_error_unpaced": unpaced_error,
        "fleets": found,
    }
    bars = [bar for name, figures in found.items() for bar in _bars(name, figures)]
    return finish(summary, bars, as_json=chosen.json)


def _bars(name: str, figures: dict[str, Any]) -> list[Bar]:
    most = MOST_ERROR_UNPACED if name == UNPACED else MOST_ERROR
    bars = [Bar(name=f"{name}: prediction_error", value=figures["prediction_error"], at_most=most)]
    for key in ("speedup_over_best_device", "speedup_by_leaving_out"):
        # Unpaced, three threads may share fewer cores, and one device alone has them all: no bar.
        if key in figures and name != UNPACED:
            bars.append(Bar(name=f"{name}: {key}", value=figures[key], at_least=1.0))
    return bars


if __name__ == "__main__":
    sys.exit(main())
