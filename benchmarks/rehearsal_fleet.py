"""A strong card with small memory and a weak one with larger memory: is the planned placement worth it?

python benchmarks/rehearsal_fleet.py --json

RTX 3080 (10 GB) and RTX 3060 (12 GB) in the ratios of the catalogue, 250 times slower and 100 times
smaller, and a transformer of 12 layers with an embedding and an output layer of 30,000 words. Beside the
plan: the even cut 4/4/4 on cards 2, 1, 2, each card alone, all on the stronger card with recomputing.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import evener as ev
from benchmarks.common import Bar, finish, parser, say
from benchmarks.rehearsal_models import Language, next_word, words
from evener.core.catalogue import FleetFile, FleetLine, Scale, resolved
from evener.core.figures import Figure
from evener.core.files import read
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Prediction, Share, Stage
from evener.core.profile import Profile
from evener.cost.evaluate import CostModel, evaluate
from evener.cost.memory import stage_memory
from evener.errors import EvenerError
from evener.planner.groups import usable_bytes
from evener.report.metrics import read_metrics
from evener.session.launch import launch
from evener.session.request import Request

LAYERS, WIDTH, VOCABULARY, CONTEXT, GLOBAL_BATCH = 12, 48, 30_000, 64, 32
SCALE = Scale(slower=250, smaller=100)
STRONG, WEAK = "lab/rtx3080", "lab/rtx3060"


def recipe() -> ev.Recipe:
    """What `evener train` runs."""
    torch.manual_seed(0)
    return ev.Recipe(
        name="transformer",
        model=Language(LAYERS, WIDTH, VOCABULARY),
        dataset=words(CONTEXT, VOCABULARY),
        loss=next_word,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
        global_batch=GLOBAL_BATCH,
    )


def cards(*names: str) -> Fleet:
    """Both cards on one board, or those named."""
    file = FleetFile(
        devices=(
            Device(name=STRONG, kind="NVIDIA GeForce RTX 3080"),
            Device(name=WEAK, kind="NVIDIA GeForce RTX 3060"),
        ),
        links=(FleetLine(a="lab", b="lab", kind="PCIe 4.0 x16"),),
        scaled=SCALE,
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


def run(fleet: Fleet, steps: int, **wishes: Any) -> tuple[float, Any, Profile | None]:
    """(median seconds of a step on the cards' clocks, the outcome, the profile if one was measured)."""
    with tempfile.TemporaryDirectory(prefix="evener-benchmark-") as folder:
        outcome = launch(
            Request(
                script=__file__,
                fleet=fleet,
                rehearse=True,
                run_dir=folder,
                steps=steps,
                evaluate=False,
                adapt=False,
                elastic=False,
                quiet=True,
                **wishes,
            )
        )
        records = read_metrics(Path(folder) / "metrics.jsonl").records
        made = Path(folder) / "profile.json"
        taken = median(r.step_s for r in records[1:] if not r.skipped)
        return taken, outcome, read(made, Profile) if made.exists() else None


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


def main() -> int:
    """The planned placement beside the others."""
    options = parser(str(__doc__)).parse_args()
    steps = 2 if options.quick else 3
    fleet = cards()
    planned_s, outcome, profile = run(fleet, steps, profile_s=20.0)
    assert profile is not None
    predicted = outcome.plan.prediction
    say(f"planned: {planned_s:.3f} s a step; {_told(outcome.plan)}; {outcome.rehearsal}; {outcome.decisions}")
    say(f"peaks {_mib(outcome.peak_bytes)}, predicted {_mib_of(predicted)}; {profile.note}")
    rows = [("planned", planned_s, predicted.step_s if predicted else float("nan"), outcome)]
    even, even_s = best_by_hand(profile, fleet, [(0, 4, WEAK), (4, 8, STRONG), (8, 12, WEAK)])
    rows.append(("(a) 4/4/4 on 3060, 3080, 3060", run(fleet, steps, plan=even)[0], even_s, None))
    for name in (STRONG, WEAK):
        alone = cards(name)
        taken, made, _ = run(alone, steps, profile=profile)
        told = made.plan.prediction
        rows.append((f"(b) {name} alone", taken, told.step_s if told else float("nan"), made))
    again, again_s = best_by_hand(profile, cards(STRONG), [(0, 12, STRONG)], recompute=True)
    rows.append(("(c) 3080 with recompute", run(cards(STRONG), steps, plan=again)[0], again_s, None))
    for name, taken, expected, _ in rows:
        say(f"{name:32} {taken:7.3f} s a step measured, {expected:7.3f} s predicted")
    say(f"the plan: {_told(outcome.plan)}")
    say(outcome.rehearsal)
    best = min(taken for _, taken, _, _ in rows[1:])
    say(f"faster than the best of the others: {best / planned_s - 1:+.1%}")
    figures = {
        "rows": [{"name": n, "step_s": t, "predicted_step_s": p} for n, t, p, _ in rows],
        "plan": _told(outcome.plan),
    }
    bars = [Bar(name="best of the others over the plan", value=best / planned_s, at_least=1.10)]
    return finish(figures, bars, as_json=options.json)


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
