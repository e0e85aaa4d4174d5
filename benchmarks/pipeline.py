"""Pipelines: how fast beside torch's own, how well foretold, what the executor costs, when a hybrid is best.

    python benchmarks/pipeline.py --json [--only speed,equal,shapes,unpaced,overhead,hybrid]

The model is benchmarks/deep_text.py. The devices of one figure are paced and measured in one run.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Bar, Run, finish, fleet_named, parser, say, train
from msgspec.structs import replace
from paced_pipeline import torch_step_s
from pipeline_overhead import CASES, overhead
from pipeline_shapes import MICRO_BATCHES, best_pipeline, even_plan, plan_of, priced, shapes
from pipeline_shapes import pipeline as pipeline_of

from evener.core.figures import line
from evener.core.fleet import Device, Fleet, Link
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.probing.identity import host_name
from evener.session.planning.measure import profile_recipe

DEEP = Path(__file__).resolve().parent / "deep_text.py"
BATCH = 16  # of benchmarks/deep_text.py
MEASURED = (1, 2)  # samples; prices go on along the line up to twice the largest
ACTION_US = {"shared": 160.0, "tcp": 400.0}
Section = tuple[dict[str, Any], list[Bar]]


def speed(profile: Profile, steps: int) -> Section:
    """Memory forces a cut: the planner's pipeline against an even one of torch on the same devices."""
    fleet = fleet_named("small-memory")
    planned = train(fleet, script=DEEP, steps=steps + 3, profile=profile, shapes="auto")
    size = _best_size(profile, fleet)
    torch_s, held = torch_step_s(str(DEEP), fleet, size, steps)
    ours = planned.report.step_s
    say(f"8:4:2:2, small memories: planned {ours:.3f} s, torch's even 1F1B {torch_s:.3f} s a step")
    figures = {
        "speedup_over_torch": torch_s / ours,
        "step_s": ours,
        "torch_step_s": torch_s,
        "torch_micro_batch": size,
        "predicted_step_s": planned.report.predicted_step_s,
        "efficiency": planned.report.efficiency,
        "layers_by_device": _layers(planned.plan),
        "timings_hold": planned.timings_hold and held,
    }
    return figures, [Bar(name="speedup_over_torch", value=figures["speedup_over_torch"], at_least=1.8)]


def equal(profile: Profile, steps: int) -> Section:
    """Four equal devices: the same even cut under both executors, and the planner's own pipeline."""
    small = fleet_named("small-memory")
    like = small.devices[1]
    devices = tuple(replace(like, name=f"lab1/{name}") for name in "abcd")
    fleet = Fleet(devices=devices, links=small.links)
    size = _best_size(profile, fleet)
    even = _run(fleet, profile, even_plan(profile, fleet, BATCH, size), steps)
    torch_s, held = torch_step_s(str(DEEP), fleet, size, steps)
    planned = train(fleet, script=DEEP, steps=steps + 3, profile=profile, shapes="auto")
    ratio, planned_ratio = even.report.step_s / torch_s, planned.report.step_s / torch_s
    say(f"equal: evener takes {ratio:.4f} of torch's {torch_s:.3f} s, with its own cut {planned_ratio:.4f}")
    figures = {
        "equal_over_torch": ratio,
        "equal_planned_over_torch": planned_ratio,
        "equal_torch_step_s": torch_s,
        "equal_timings_hold": even.timings_hold and held and planned.timings_hold,
    }
    return figures, [
        Bar(name="equal_over_torch", value=ratio, at_least=0.97, at_most=1.03),
        Bar(name="equal_planned_over_torch", value=planned_ratio, at_most=1.03),
    ]


def paced_shapes(profile: Profile, steps: int) -> Section:
    """Plans of many shapes against the simulator."""
    fleet = fleet_named("8-4-2-2")
    found: dict[str, Any] = {}
    for name, plan in shapes(fleet, profile, BATCH).items():
        found[name] = _compared(name, _run(fleet, profile, plan, steps))
    bars = [Bar(name=f"{n}: prediction_error", value=f["error"], at_most=0.03) for n, f in found.items()]
    return {"shapes": found, "prediction_error": max(f["error"] for f in found.values())}, bars


def unpaced(steps: int) -> Section:
    """Two real processes of one thread each, measured at the same time, then two stages on them."""
    host = host_name()
    kinds = {"one": "cpu of one thread, first", "two": "cpu of one thread, second"}
    devices = tuple(Device(name=f"{host}/{n}", kind=k, threads=1) for n, k in kinds.items())
    fleet = Fleet(devices=devices, links=(Link(a=host, b=host, curve=line(1e-4, 2e9)),))
    profile = train(fleet, script=DEEP, rehearse=False, steps=1, micro_batch=2).profile
    blocks = [i for i, layer in enumerate(profile.layers) if layer.name.startswith("blocks.")]
    names = tuple(d.name for d in devices)
    plan = plan_of(pipeline_of(profile, BATCH, 2, (blocks[len(blocks) // 2],), names))
    run = train(
        fleet,
        script=DEEP,
        rehearse=False,
        steps=steps,
        profile=profile,
        plan=priced(fleet, profile, plan),
    )
    figures = _compared("unpaced, two stages", run)
    bar = Bar(name="unpaced: prediction_error", value=figures["error"], at_most=0.10)
    return {"unpaced": figures}, [bar]


def overheads(rounds: int) -> Section:
    """The executor beside torch's, unpaced."""
    cases = {name: overhead(name, rounds) for name in CASES}
    tiny, large = (cases[name] for name in CASES)
    bars = [
        *(
            Bar(
                name=f"overhead, 2 ms and more, {t}",
                value=large["ratio"][t],
                at_most=1.0 + abs(large["control"] - 1.0),
            )
            for t in ACTION_US
        ),
        *(
            Bar(name=f"overhead, almost no compute, {t}", value=tiny["ratio"][t], at_most=0.6)
            for t in ACTION_US
        ),
        *(Bar(name=f"action_us {t}", value=tiny["action_us"][t], at_most=us) for t, us in ACTION_US.items()),
        *(
            Bar(name=f"varying shapes, {n}", value=c["varying_over_fixed"], at_most=1.1)
            for n, c in cases.items()
        ),
    ]
    return {"overhead": cases}, bars


def hybrid(profile: Profile, steps: int) -> Section:
    """A large device beside two small ones: the planner's plan against the best of each pure kind."""
    fleet = fleet_named("large-and-small")
    planned = train(fleet, script=DEEP, steps=steps + 3, profile=profile, shapes="all")
    flat = train(fleet, script=DEEP, steps=steps + 3, profile=profile, shapes="data-parallel")
    cut = _run(fleet, profile, best_pipeline(fleet, profile, BATCH), steps)
    pipelines = [len(p.stages) for p in planned.plan.pipelines]
    step_s = {"planned": planned, "data parallel": flat, "best pipeline": cut}
    seconds = {name: run.report.step_s for name, run in step_s.items()}
    say(f"hybrid: {seconds}, the planner chose pipelines of {pipelines} stages")
    figures = {
        "hybrid_step_s": seconds,
        "hybrid_stages": pipelines,
        "hybrid_over_data_parallel": seconds["data parallel"] / seconds["planned"],
        "hybrid_over_pipeline": seconds["best pipeline"] / seconds["planned"],
        "hybrid_timings_hold": all(run.timings_hold for run in step_s.values()),
    }
    return figures, [
        Bar(name="the planner picks a hybrid", value=float(len(pipelines) > 1 < max(pipelines)), at_least=1),
        Bar(name="hybrid_over_data_parallel", value=figures["hybrid_over_data_parallel"], at_least=1.0),
        Bar(name="hybrid_over_pipeline", value=figures["hybrid_over_pipeline"], at_least=1.0),
    ]


def _best_size(profile: Profile, fleet: Fleet) -> int:
    """The micro-batch with which an even pipeline should be fastest: what its user would settle on."""

    def predicted_s(size: int) -> float:
        told = priced(fleet, profile, even_plan(profile, fleet, BATCH, size)).prediction
        return told.step_s if told else 0.0

    return min(MICRO_BATCHES, key=predicted_s)


def _run(fleet: Fleet, profile: Profile, plan: Plan, steps: int) -> Run:
    return train(fleet, script=DEEP, steps=steps + 3, profile=profile, plan=priced(fleet, profile, plan))


def _compared(name: str, run: Run) -> dict[str, Any]:
    report = run.report
    assert report.predicted_step_s is not None
    error = abs(report.predicted_step_s / report.step_s - 1)
    say(
        f"{name}: predicted {report.predicted_step_s:.4g} s, measured {report.step_s:.4g} s "
        f"±{report.spread:.1%}, error {error:.2%}, efficiency {report.efficiency:.3f}"
    )
    return {
        "error": error,
        "predicted_step_s": report.predicted_step_s,
        "step_s": report.step_s,
        "spread": report.spread,
        "efficiency": report.efficiency,
        "timings_hold": run.timings_hold,
    }


def _layers(plan: Plan) -> dict[str, int]:
    return {d: len(s.layers) for _, _, s in plan.numbered_stages() for x in s.shares for d in x.devices}


def main(arguments: list[str] | None = None) -> int:
    """Measure what is asked for; 1 when a bar was missed."""
    options = parser(__doc__ or "")
    options.add_argument("--only", default="", help="these figures, with commas between")
    chosen = options.parse_args(arguments)
    os.environ["EVENER_EXAMPLE_DATA"] = "digits"
    steps = 1 if chosen.quick else 3  # a paced device repeats itself to 0.1 %
    made: list[Profile] = []

    def with_profile(section: Callable[[Profile, int], Section]) -> Section:
        if not made:
            made.append(_profile(30.0 if chosen.quick else 60.0))
        return section(made[0], steps)

    sections: dict[str, Callable[[], Section]] = {
        "speed": lambda: with_profile(speed),
        "equal": lambda: with_profile(equal),
        "shapes": lambda: with_profile(paced_shapes),
        "hybrid": lambda: with_profile(hybrid),
        "unpaced": lambda: unpaced(6 if chosen.quick else 20),
        "overhead": lambda: overheads(20 if chosen.quick else 200),
    }
    wanted = [w for w in chosen.only.split(",") if w] or list(sections)
    if unknown := sorted(set(wanted) - set(sections)):
        say(f"no figures called {', '.join(unknown)}; there are {', '.join(sections)}")
        return 2
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    for name in wanted:
        found, its_bars = sections[name]()
        figures |= found
        bars += its_bars
    return finish(figures, bars, as_json=chosen.json)


def _profile(budget_s: float) -> Profile:
    """The deep model on the kinds of devices of 8:4:2:2, which all fleets here are made of."""
    return profile_recipe(
        str(DEEP),
        fleet=fleet_named("8-4-2-2"),
        rehearse=True,
        micro_batches=MEASURED,
        seed=0,
        budget_s=budget_s,
        report=say,
    )


if __name__ == "__main__":
    sys.exit(main())
