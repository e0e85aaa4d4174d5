"""A stage larger than its card: parameters on the host, or only the optimiser there. Predicted and measured.

python benchmarks/host_residence.py --json

A language model whose parameters, gradients and AdamW state exceed a rehearsed RTX 3080, on PCIe 4.0 x16 and
on a link four times slower, with the card's memory capped at what each way needs by its prediction and a
little more. The device's clock says what a step takes; the same run with copies that take no time says what
of them shows. What its own allocator counted at most stands beside the predicted peak. Then budgets: what the
planner chooses under each is to be the fastest of all ways that were measured and fit.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import evener as ev
from benchmarks.common import Bar, finish, parser, say
from benchmarks.rehearsal_models import transformer
from evener.core.catalogue import FleetFile, FleetLine, Scale, resolved
from evener.core.figures import Curve, Figure
from evener.core.files import read
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.profile import Profile
from evener.cost.evaluate import CostModel, evaluate
from evener.report.metrics import read_metrics
from evener.session.launching.launch import launch
from evener.session.request import Request

LAYERS, WIDTH, VOCABULARY, CONTEXT, GLOBAL_BATCH = 8, 128, 1000, 32, 16
SCALE = Scale(slower=200, smaller=100)
CARD = "lab/rtx3080"
WAYS: list[
    tuple[str | None, bool, int, float]
] = [  # (residence, recompute, micro-batch, times slower a link)
    (None, False, 8, 1),
    (None, True, 8, 1),
    ("host-optimizer", False, 8, 1),
    ("host", False, 8, 1),
    ("host", False, 4, 1),
    ("host", False, 8, 4),
    ("host", True, 8, 1),
]
STEPS = 4
BUDGETS = (0.9, 0.5, 0.2)  # of what everything on the device needs


def recipe() -> ev.Recipe:
    """What `evener train` runs."""
    return transformer(LAYERS, WIDTH, VOCABULARY, CONTEXT, GLOBAL_BATCH)


def card(*, memory: float | None = None, slower_link: float = 1.0, copies: bool = True) -> Fleet:
    """The card in its host, with `memory` bytes; without `copies` the link takes next to no time."""
    file = FleetFile(
        devices=(Device(name=CARD, kind="NVIDIA GeForce RTX 3080"),),
        links=(FleetLine(a="lab", b="lab", kind="PCIe 4.0 x16"),),
        scaled=SCALE,
    )
    fleet = resolved(file, "here").as_rehearsed()
    (device,), (link,) = fleet.devices, fleet.links
    points = tuple((b, s * slower_link if copies else 1e-9 * (1 + b / 1e12)) for b, s in link.curve.points)
    own = Figure(value=memory, source="assumed") if memory else device.memory_bytes
    # The host's memory is as fast as the link as it is, whatever is then tried of the link.
    rate = 2**20 / (link.curve.seconds(2**21) - link.curve.seconds(2**20))
    cpu = Device(
        name="lab/cpu",
        kind="host",
        bytes_per_s=Figure(value=rate, source="assumed"),
        memory_bytes=Figure(value=64e9 / SCALE.smaller, source="assumed"),
    )
    return replace(
        fleet,
        devices=(replace(device, memory_bytes=own, free_memory_bytes=None),),
        links=(replace(link, curve=Curve(points=points, source="assumed")),),
        hosts=(cpu,),
    )


def plan_of(profile: Profile, residence: str | None, micro_batch: int, *, recompute: bool) -> Plan:
    """The whole model on the card."""
    stage = Stage(
        layers=tuple(x.name for x in profile.layers),
        shares=(Share(devices=(CARD,), samples=micro_batch),),
        residence=residence,
        recompute=recompute,
    )
    pipeline = Pipeline(samples=GLOBAL_BATCH, micro_batch=micro_batch, stages=(stage,))
    return Plan(global_batch=GLOBAL_BATCH, pipelines=(pipeline,), schedule="1f1b")


def run(fleet: Fleet, **wishes: Any) -> tuple[Any, list[Any], Profile | None]:
    """A run of a few steps: its outcome, the records of its steps, and the profile that it measured."""
    with tempfile.TemporaryDirectory(prefix="evener-benchmark-") as folder:
        outcome = launch(
            Request(
                script=str(Path(__file__).resolve()),
                fleet=fleet,
                rehearse=True,
                run_dir=folder,
                steps=STEPS,
                evaluate=False,
                quiet=True,
                profile_s=6.0,
                **wishes,
            )
        )
        made = Path(folder) / "profile.json"
        return (
            outcome,
            read_metrics(Path(folder) / "metrics.jsonl").records,
            read(made, Profile) if made.exists() else None,
        )


def step_s(records: list[Any]) -> float:
    """Seconds of a step on the device's clock, the first one left out."""
    return median(r.step_s for r in records[1:])


def measured(profile: Profile, way: tuple[str | None, bool, int, float]) -> dict[str, Any]:
    """One way, predicted and measured, with the card's memory capped a little above the prediction."""
    residence, recompute, micro_batch, slower = way
    plan = plan_of(profile, residence, micro_batch, recompute=recompute)
    told = evaluate(CostModel(fleet=card(slower_link=slower), profile=profile), plan)
    framework = card().devices[0].framework_bytes
    cap = told.memory_bytes[CARD] * 1.15 + (framework.value if framework else 0.0)
    outcome, records, _ = run(card(memory=cap, slower_link=slower), plan=plan)
    _, without, _ = run(card(memory=cap, copies=False), plan=plan)
    peak, seconds = outcome.peak_bytes[CARD].value, step_s(records)
    row = {
        "residence": residence,
        "recompute": recompute,
        "micro_batch": micro_batch,
        "slower_link": slower,
        "cap_bytes": cap,
        "predicted_bytes": told.memory_bytes[CARD],
        "peak_bytes": peak,
        "peak_error": told.memory_bytes[CARD] / peak - 1,
        "predicted_step_s": told.step_s,
        "step_s": seconds,
        "step_error": told.step_s / seconds - 1,
        "predicted_exposed_s": told.seconds[CARD].get("transfer", 0.0),
        "exposed_s": median(r.seconds[CARD].get("transfer", 0.0) for r in records[1:]),
        "without_copies_s": step_s(without),
    }
    again = ", recomputed" if recompute else ""
    say(
        f"{residence or 'device':15}micro-batch {micro_batch:2}{again}, link 1/{slower:g}: "
        f"step {told.step_s:7.4f} s predicted, {seconds:7.4f} measured ({row['step_error']:+.1%}), "
        f"{step_s(without):7.4f} without copies, waiting for copies {row['predicted_exposed_s']:.4f} "
        f"predicted, {row['exposed_s']:.4f} measured; "
        f"peak {row['predicted_bytes'] / 2**20:6.2f} MiB predicted, {peak / 2**20:6.2f} measured "
        f"({row['peak_error']:+.1%})"
    )
    return row


def planned(profile: Profile, rows: list[dict[str, Any]], part: float) -> dict[str, Any]:
    """What the planner does under a budget of `part` of what everything on the device needs."""
    alike = [r for r in rows if r["micro_batch"] == 8 and r["slower_link"] == 1]
    framework = card().devices[0].framework_bytes
    room = part * next(r["peak_bytes"] for r in alike if r["residence"] is None and not r["recompute"])
    memory = (room + (framework.value if framework else 0.0)) / 0.9  # a tenth is left free
    outcome, records, _ = run(card(memory=memory), profile=profile, micro_batch=8)
    ((_, _, stage),) = outcome.plan.numbered_stages()
    fitting = {(r["residence"], r["recompute"]): r["step_s"] for r in alike if r["peak_bytes"] <= room}
    row = {
        "budget_bytes": room,
        "residence": stage.residence,
        "recompute": stage.recompute,
        "step_s": step_s(records),
        "predicted_step_s": outcome.plan.prediction.step_s,
        "peak_bytes": outcome.peak_bytes[CARD].value,
        "fastest_that_fits_s": min(fitting.values()),
        "micro_batch": outcome.plan.pipelines[0].micro_batch,
    }
    say(
        f"budget {room / 2**20:.1f} MiB: planned {stage.residence or 'device'}"
        f"{', recomputed' if stage.recompute else ''}, micro-batch {row['micro_batch']}: "
        f"{row['predicted_step_s']:.4f} s predicted, "
        f"{row['step_s']:.4f} measured, peak {row['peak_bytes'] / 2**20:.1f} MiB; the fastest of "
        f"{len(fitting)} that fit takes {row['fastest_that_fits_s']:.4f}"
    )
    return row


def bars_of(rows: list[dict[str, Any]]) -> list[Bar]:
    """Predictions against what was measured, and what the residences are for."""
    hosted = [r for r in rows if r["residence"]]
    bars = [
        Bar(name="peaks off their prediction", value=max(abs(r["peak_error"]) for r in hosted), at_most=0.05),
        Bar(name="lowest predicted peak", value=min(r["peak_error"] for r in hosted), at_least=-0.02),
        Bar(name="steps off their prediction", value=max(abs(r["step_error"]) for r in hosted), at_most=0.05),
    ]
    plain = next((r for r in rows if r["residence"] is None), None)
    if plain:
        least = min(r["peak_bytes"] for r in hosted) / plain["peak_bytes"]
        bars.append(Bar(name="peak of the least against all on the device", value=least, at_most=0.6))
    return bars


def main() -> int:
    """Predicted beside measured, way by way."""
    options = parser(str(__doc__)).parse_args()
    _, _, profile = run(card())
    assert profile is not None
    rows = [measured(profile, way) for way in (WAYS[1:3] if options.quick else WAYS)]
    bars, plans = bars_of(rows), []
    if not options.quick:
        plans = [planned(profile, rows, part) for part in BUDGETS]
        worst = max(p["step_s"] / p["fastest_that_fits_s"] for p in plans)
        bars.append(
            Bar(name="planned step against the fastest measured that fits", value=worst, at_most=1.02)
        )
    return finish({"rows": rows, "plans": plans}, bars, as_json=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
