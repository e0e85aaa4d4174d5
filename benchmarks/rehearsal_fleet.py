"""A strong card with small memory and a weak one with larger memory: is the planned placement worth it?

    python benchmarks/rehearsal_fleet.py --profile profile.json --only planned --json
    python benchmarks/rehearsal_fleet.py --profile profile.json --json

RTX 3080 (10 GB) and RTX 3060 (12 GB) in the ratios of the catalogue, `--slower` times slower and 100 times
smaller, and a transformer of 12 layers with an embedding and an output layer of 30,000 words. Beside the
plan: the even cut 4/4/4 on cards 2, 1, 2, each card alone, all on the stronger card with recomputing.

Each row is predicted, and measured on the clocks of the cards, which are the wall's where this machine keeps
up: a row in which a card ends more than 1 % behind its clock is void and misses its bar. `--profile` keeps
the profile between calls, and `--only` runs some rows: all of it takes minutes.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import evener as ev
from benchmarks.common import Bar, finish, parser, say
from benchmarks.rehearsal_models import transformer
from evener.core.catalogue import FleetFile, FleetLine, Scale, resolved
from evener.core.figures import Figure
from evener.core.files import read
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Prediction, Share, Stage
from evener.core.profile import Profile
from evener.cost.evaluate import CostModel, evaluate
from evener.cost.memory import stage_memory, usable_bytes
from evener.errors import EvenerError
from evener.report.metrics import read_metrics
from evener.session.journal import Outcome
from evener.session.launching.launch import launch
from evener.session.request import Request

LAYERS, WIDTH, VOCABULARY, CONTEXT, GLOBAL_BATCH = 12, 48, 30_000, 64, 32
SLOWER, SMALLER = 600.0, 100.0
PROFILE_S = 90.0
PREDICTED_WITHIN = 0.05
ROWS = ("planned", "even", "strong", "weak", "recomputed")
STRONG, WEAK = "lab/rtx3080", "lab/rtx3060"


def recipe() -> ev.Recipe:
    """What `evener train` runs."""
    return transformer(LAYERS, WIDTH, VOCABULARY, CONTEXT, GLOBAL_BATCH)


def cards(slower: float, *names: str) -> Fleet:
    """Both cards on one board, or those named."""
    file = FleetFile(
        devices=(
            Device(name=STRONG, kind="NVIDIA GeForce RTX 3080"),
            Device(name=WEAK, kind="NVIDIA GeForce RTX 3060"),
        ),
        links=(FleetLine(a="lab", b="lab", kind="PCIe 4.0 x16"),),
        scaled=Scale(slower=slower, smaller=SMALLER),
    )
    whole = resolved(file, "here").as_rehearsed()
    return whole.only(names) if names else whole


def by_hand(cuts: list[tuple[int, int, str]], profile: Profile, micro_batch: int, **stage: Any) -> Plan:
    """Stages of the blocks `first` to `last` on a card; the ends of the model go with the outer ones."""
    names = [x.name for x in profile.layers]
    blocks = [n for n in names if n.startswith("blocks.")]
    begin, end = names.index(blocks[0]), names.index(blocks[-1]) + 1
    stages = []
    for place, (first, last, card) in enumerate(cuts):
        start = 0 if place == 0 else begin + first
        stop = len(names) if place == len(cuts) - 1 else begin + last
        assert stop <= len(names) and begin <= end
        share = Share(devices=(card,), samples=micro_batch)
        stages.append(Stage(layers=tuple(names[start:stop]), shares=(share,), **stage))
    pipeline = Pipeline(samples=GLOBAL_BATCH, micro_batch=micro_batch, stages=tuple(stages))
    return Plan(global_batch=GLOBAL_BATCH, pipelines=(pipeline,), schedule="1f1b")


def run(fleet: Fleet, steps: int, folder: Path, **wishes: Any) -> tuple[float, Outcome]:
    """(median seconds of a step on the cards' clocks but for the first, the outcome)."""
    outcome = launch(
        Request(
            script=__file__,
            fleet=fleet,
            rehearse=True,
            run_dir=str(folder),
            steps=steps,
            evaluate=False,
            adapt=False,
            elastic=False,
            quiet=True,
            **wishes,
        )
    )
    records = read_metrics(folder / "metrics.jsonl").records
    return median(r.step_s for r in records[1:] if not r.skipped), outcome


def best_by_hand(
    profile: Profile, fleet: Fleet, cuts: list[tuple[int, int, str]], **stage: Any
) -> tuple[Plan, float]:
    """The quickest micro-batch, by prediction, that fits; and its predicted seconds."""
    model = CostModel(fleet=fleet, profile=profile)
    found: list[tuple[float, Plan]] = []
    for size in (1, 2, 4, 8, 16, 32):
        plan = by_hand(cuts, profile, size, **stage)
        try:
            cost = evaluate(model, plan)
        except EvenerError as e:
            say(f"micro-batch {size} of {len(cuts)} stages: {e.what}")
            continue
        if size == 1 or held_fits(model, plan):  # one sample is tried whatever is predicted
            found.append((cost.step_s, plan))
    step_s, plan = min(found, key=lambda x: x[0])
    return plan, step_s


def held_fits(model: CostModel, plan: Plan) -> bool:
    """Whether every card has room for the sum of its stages, as a plan would allow."""
    held: dict[str, float] = {}
    places = {x.name: i for i, x in enumerate(model.profile.layers)}
    stages = plan.pipelines[0].stages
    for number, stage in enumerate(stages):
        share = stage.shares[0]
        bytes_ = stage_memory(
            model.bytes,
            places[stage.layers[0]],
            places[stage.layers[-1]] + 1,
            samples=share.samples,
            in_flight=min(len(stages) - number, len(plan.pipelines[0].micro_batch_sizes)),
            recompute=stage.recompute,
        )
        held[share.devices[0]] = held.get(share.devices[0], 0.0) + bytes_.total
    return all(b <= usable_bytes(model.fleet.device(n), 0.1) for n, b in held.items())


def row(
    name: str, slower: float, profile: Profile, steps: int, folder: Path
) -> tuple[str, float, float, Outcome]:
    """(what it is, seconds measured, seconds predicted, the outcome) of one of `ROWS`."""
    fleet, both = cards(slower, STRONG), cards(slower)
    if name == "planned":
        taken, made = run(both, steps, folder, profile=profile)
        return "planned", taken, _predicted_s(made), made
    if name in ("strong", "weak"):
        alone = cards(slower, STRONG if name == "strong" else WEAK)
        taken, made = run(alone, steps, folder, profile=profile)
        return f"(b) {alone.devices[0].name} alone", taken, _predicted_s(made), made
    if name == "even":
        plan, expected = best_by_hand(profile, both, [(0, 4, WEAK), (4, 8, STRONG), (8, 12, WEAK)])
        return "(a) 4/4/4 on 3060, 3080, 3060", *_by(plan, expected, both, steps, folder)
    plan, expected = best_by_hand(profile, fleet, [(0, 12, STRONG)], recompute=True)
    return "(c) 3080 with recompute", *_by(plan, expected, fleet, steps, folder)


def _by(
    plan: Plan, expected_s: float, fleet: Fleet, steps: int, folder: Path
) -> tuple[float, float, Outcome]:
    taken, made = run(fleet, steps, folder, plan=plan)
    return taken, expected_s, made


def _predicted_s(outcome: Outcome) -> float:
    assert outcome.plan.prediction is not None
    return outcome.plan.prediction.step_s


def profiled(slower: float, path: Path, folder: Path) -> Profile:
    """The profile at `path`, measured first where there is none: whatever the wall does, on their clocks."""
    if not path.exists():
        _, made = run(cards(slower), 2, folder, profile_s=PROFILE_S)
        path.write_bytes((folder / "profile.json").read_bytes())
        say(f"profile: {made.rehearsal}")
    profile = read(path, Profile)
    say(f"profile: {profile.note or 'all sizes measured'}")
    return profile


def main() -> int:
    """The planned placement beside the others."""
    p = parser(str(__doc__))
    p.add_argument("--only", default=",".join(ROWS), help=f"rows, of: {', '.join(ROWS)}")
    p.add_argument("--profile", type=Path, help="file that keeps the cards' profile between calls")
    p.add_argument("--slower", type=float, default=SLOWER, help=f"times slower than the cards ({SLOWER:g})")
    options = p.parse_args()
    rows, bars = [], []
    with tempfile.TemporaryDirectory(prefix="evener-benchmark-") as scratch:
        here = Path(scratch)
        kept = options.profile or here / "profile.json"
        profile = profiled(options.slower, kept, here / "profiling")
        for name in options.only.split(","):
            steps = 2 if options.quick else 3
            told, taken, expected, made = row(name, options.slower, profile, steps, here / name)
            say(f"{told:32} {taken:7.3f} s a step measured, {expected:7.3f} s predicted; {_told(made.plan)}")
            say(f"    peaks {_mib(made.peak_bytes)}, predicted {_mib_of(made.plan.prediction)}")
            say(f"    {made.rehearsal}")
            rows.append({"name": name, "what": told, "step_s": taken, "predicted_step_s": expected})
            rows[-1] |= {"plan": _told(made.plan), "timings_hold": made.timings_hold}
            off = abs(expected / taken - 1)
            bars.append(Bar(name=f"{name}: predicted beside measured", value=off, at_most=PREDICTED_WITHIN))
            bars.append(Bar(name=f"{name}: timings hold", value=made.timings_hold, at_least=1))
    others = [r["step_s"] for r in rows if r["name"] != "planned"]
    mine = [r["step_s"] for r in rows if r["name"] == "planned"]
    if others and mine:
        say(f"faster than the best of the others: {min(others) / mine[0] - 1:+.1%}")
        best = min(others) / mine[0]
        bars.append(Bar(name="best of the others over the plan", value=best, at_least=1.10))
    return finish({"slower": options.slower, "rows": rows}, bars, as_json=options.json)


def _mib(peaks: dict[str, Figure]) -> str:
    return ", ".join(f"{n} {f.value / 2**20:.1f} MiB" for n, f in peaks.items())


def _mib_of(prediction: Prediction | None) -> str:
    held = prediction.memory_bytes if prediction else {}
    return ", ".join(f"{n} {b / 2**20:.1f} MiB" for n, b in held.items())


def _told(plan: Plan) -> str:
    """The plan in a line."""
    parts = []
    for pipeline in plan.pipelines:
        stages = [
            f"{len(s.layers)} layers on {'+'.join(d for x in s.shares for d in x.devices)}"
            + (" recomputed" if s.recompute else "")
            for s in pipeline.stages
        ]
        parts.append(f"{pipeline.samples} samples in {pipeline.micro_batch}s: {', '.join(stages)}")
    return "; ".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
