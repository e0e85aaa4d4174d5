"""The recommender example with its tables in different places: one result, and rows looked up a second."""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.common import ROOT, Bar, fleet_named, say
from evener.core.files import read
from evener.core.plan import Plan
from evener.report.metrics import read_metrics
from evener.session.checkpoints.tensors import load_weights
from evener.session.launching.launch import launch
from evener.session.request import Request

SHARES = {"lab1/a": 5, "lab1/b": 3, "lab1/c": 2}
TABLES = ("user", "movie", "genres", "job", "age")
SCRIPT = """
import sys
sys.path.insert(0, {examples!r})
import recommender
recommender.PLACE = {place!r}
recommender.cross_rows = lambda: {rows}
recipe = recommender.recipe
"""


def recommender(args: argparse.Namespace) -> tuple[dict[str, Any], list[Bar]]:
    """The example with its tables dense on one device, on the CPU, shared out and tiered: the same metric."""
    figures: dict[str, Any] = {}
    epochs, rows = (0.05, 0) if args.quick else (args.epochs, args.rows)
    names = (*TABLES, "cross") if rows else TABLES
    with tempfile.TemporaryDirectory(prefix="evener-benchmark-") as folder:
        tier = {"file": str(Path(folder) / "tier"), "rows": 1200}
        for kind, place, plan in (
            ("dense", {}, "recommender-alone"),
            ("cpu", dict.fromkeys(names, "cpu"), "recommender-alone"),
            ("shared 5:3:2", dict.fromkeys(names, SHARES), "recommender"),
            ("tiered", dict.fromkeys(names, "cpu") | {"movie": tier}, "recommender-alone"),
        ):
            figures[kind] = trained(Path(folder) / f"run-{len(figures)}", place, plan, epochs, rows)
            found = figures[kind]
            say(f"{kind}: area {found['area']:.5f}, {found['rows_per_s']:,.0f} rows/s")
    away = {kind: abs(f["area"] - figures["dense"]["area"]) for kind, f in figures.items() if kind != "dense"}
    return figures, [Bar(name=f"{k}: area away from dense", value=v, at_most=2e-3) for k, v in away.items()]


def trained(folder: Path, place: dict[str, Any], plan: str, epochs: float, rows: int) -> dict[str, float]:
    """Area under the curve, held-out loss and rows/s of the example with its tables in `place`."""
    sys.path.insert(0, str(ROOT / "examples"))
    import recommender as example

    folder.mkdir()
    script = folder / "job.py"
    script.write_text(
        SCRIPT.format(examples=str(ROOT / "examples"), place=place, rows=rows), encoding="utf-8"
    )
    made = read(ROOT / "examples" / "plans" / f"{plan}.json", Plan)
    made = _with_cross(made) if rows else made
    request = Request(
        fleet=fleet_named("8-4-2-2").only(made.devices),
        script=str(script),
        run_dir=str(folder),
        plan=made,
        epochs=epochs,
        quiet=True,
    )
    outcome = launch(request)
    model = example.Towers(rows)
    load_weights(model, folder)
    records = read_metrics(folder / "metrics.jsonl").records
    step_s = median(r.step_s for r in records[1:] or records)
    columns = example.ratings(rows)[0][0].shape[1] - (0 if rows else 1)
    assert outcome.heldout_loss is not None
    return {
        "area": example.heldout_area(model, rows),
        "heldout_loss": outcome.heldout_loss,
        "rows_per_s": made.global_batch * columns / step_s,
    }


def _with_cross(plan: Plan) -> Plan:
    """The plan of the model that has the synthetic table as well."""
    replace = msgspec.structs.replace

    def more(pipeline):
        (stage,) = pipeline.stages
        return replace(pipeline, stages=(replace(stage, layers=(*stage.layers, "cross")),))

    return replace(plan, pipelines=tuple(map(more, plan.pipelines)))
