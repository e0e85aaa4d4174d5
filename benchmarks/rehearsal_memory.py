"""Is the memory that a plan predicts what its devices then hold? On rehearsed accelerators, which count it.

python benchmarks/rehearsal_memory.py --json

Each row is a run of two steps: a model, an optimiser, a precision, a micro-batch, recomputed or not, whole on
one device or cut in two. What was predicted before it stands beside the allocator's peak after it.
"""

import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common import ROOT, Bar, finish, parser, say
from benchmarks.rehearsal_models import SCRIPT
from evener.core.catalogue import FleetFile, FleetLine, resolved
from evener.core.files import read
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.profile import Profile
from evener.cost.evaluate import CostModel, evaluate
from evener.session.launching.launch import launch
from evener.session.request import Request

GLOBAL_BATCH = 32
PROFILES = [
    (model, optimizer, precision)
    for model in ("language", "images", "tables")
    for optimizer, precision in (("adamw", "float32"), ("sgd", "float32"), ("adamw", "bfloat16"))
]
SHAPES = [  # (micro-batch, recompute, stages)
    (2, False, 1),
    (16, False, 1),
    (16, True, 1),
    (4, False, 2),
]


def cards(num: int) -> Fleet:
    """The first `num` of two cards, at their real speed: this machine is the slower part, nothing waits."""
    file = FleetFile(
        devices=(Device(name="lab/gpu0", kind="RTX 3080"), Device(name="lab/gpu1", kind="RTX 3060"))[:num],
        links=(FleetLine(a="lab", b="lab", kind="PCIe 4.0 x16"),),
    )
    return resolved(file, "here").as_rehearsed()


def plan_of(profile: Profile, fleet: Fleet, micro_batch: int, *, recompute: bool, stages: int) -> Plan:
    """The whole model on one card, or cut in half over two."""
    names = [x.name for x in profile.layers]
    middle = len(names) // 2
    runs = [names] if stages == 1 else [names[:middle], names[middle:]]
    made = tuple(
        Stage(
            layers=tuple(run),
            shares=(Share(devices=(device.name,), samples=micro_batch),),
            recompute=recompute,
        )
        for run, device in zip(runs, fleet.devices, strict=True)
    )
    pipeline = Pipeline(samples=GLOBAL_BATCH, micro_batch=micro_batch, stages=made)
    return Plan(global_batch=GLOBAL_BATCH, pipelines=(pipeline,), schedule="1f1b")


def run(script: Path, fleet: Fleet, **wishes: Any) -> tuple[Any, Profile | None]:
    """A run of two steps, and the profile that it measured."""
    with tempfile.TemporaryDirectory(prefix="evener-benchmark-") as folder:
        request = Request(
            script=str(script),
            fleet=fleet,
            rehearse=True,
            run_dir=folder,
            steps=2,
            evaluate=False,
            quiet=True,
            profile_s=5.0,
            **wishes,
        )
        outcome = launch(request)
        made = Path(folder) / "profile.json"
        return outcome, read(made, Profile) if made.exists() else None


def measured_rows(script: Path, profile: Profile, shapes: list[tuple]) -> list[dict[str, Any]]:
    """Predicted and measured peak of each device of each shape."""
    rows = []
    for micro_batch, recompute, stages in shapes:
        fleet = cards(stages)
        # One profile serves both cards: bytes are those of the model.
        by_kind = [_as_kind(profile, d.kind) for d in fleet.devices]
        model = CostModel(fleet=fleet, profile=_merged(by_kind))
        plan = plan_of(profile, fleet, micro_batch, recompute=recompute, stages=stages)
        predicted = evaluate(model, plan).memory_bytes
        outcome, _ = run(script, fleet, plan=plan)
        for name, peak in outcome.peak_bytes.items():
            rows.append(
                {
                    "micro_batch": micro_batch,
                    "recompute": recompute,
                    "stages": stages,
                    "device": name,
                    "predicted": predicted[name],
                    "measured": peak.value,
                    "error": predicted[name] / peak.value - 1,
                }
            )
    return rows


def _as_kind(profile: Profile, kind: str) -> Profile:
    from msgspec.structs import replace

    return replace(
        profile,
        timings=tuple(replace(t, kind=kind) for t in profile.timings),
        steps=tuple(replace(s, kind=kind) for s in profile.steps),
    )


def _merged(profiles: list[Profile]) -> Profile:
    from evener.core.profile import merge_profiles

    return merge_profiles(profiles)


def all_rows(*, quick: bool = False) -> list[dict[str, Any]]:
    """Rows of every profile and shape."""
    rows = []
    for model, optimizer, precision in PROFILES[:1] if quick else PROFILES:
        with tempfile.TemporaryDirectory(prefix="evener-benchmark-") as folder:
            script = Path(folder) / "job.py"
            script.write_text(
                SCRIPT.format(
                    root=str(ROOT),
                    model=model,
                    optimizer=optimizer,
                    precision=precision,
                    global_batch=GLOBAL_BATCH,
                ),
                encoding="utf-8",
            )
            _, profile = run(script, cards(1))
            assert profile is not None
            for row in measured_rows(script, profile, SHAPES[:2] if quick else SHAPES):
                rows.append({"model": model, "optimizer": optimizer, "precision": precision} | row)
                again = "recomputed" if row["recompute"] else ""
                say(
                    f"{model:9}{optimizer:9}{precision:9} micro-batch {row['micro_batch']:3} {again:10} "
                    f"{row['device']} of {row['stages']}: predicted {row['predicted'] / 2**20:8.3f} MiB, "
                    f"measured {row['measured'] / 2**20:8.3f}, {row['error']:+.1%}"
                )
    return rows


def bars_of(rows: list[dict[str, Any]]) -> list[Bar]:
    """Mean distance, and how far below the peak the lowest prediction is."""
    return [
        Bar(name="combinations", value=len(rows), at_least=30),
        Bar(name="mean error of the peak", value=mean(abs(r["error"]) for r in rows), at_most=0.05),
        Bar(name="lowest prediction", value=min(r["error"] for r in rows), at_least=-0.02),
    ]


def main() -> int:
    """Predicted beside measured."""
    options = parser(str(__doc__)).parse_args()
    rows = all_rows(quick=options.quick)
    bars = bars_of(rows) if not options.quick else []
    return finish({"rows": rows}, bars, as_json=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
