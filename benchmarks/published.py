"""Predictions beside published measurements: step time, gradient synchronisation, peak memory, row by row.

    python benchmarks/published.py --data ../shared/published/gh200.json --json
    python benchmarks/published.py --data ../shared/published/gh200.json --fit

Every row becomes a fleet, a profile and a plan, and is priced by the cost model that the planner uses; only
how the published runs send, sum and hold differs from evener (`Trainer`). What no profile holds is in
`published.json` beside this file: six constants, fitted on the OPT-350 rows of gh200.json alone. `--fit`
finds them again. Never imports torch.
"""

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.published_data import Published, read_published
from benchmarks.published_rows import Overheads, case_of, kinds_of
from evener.core.figures import Source, Value
from evener.core.files import read, write
from evener.cost.evaluate import CostModel, evaluate
from evener.errors import EvenerError, UsageError

CONSTANTS = Path(__file__).with_suffix(".json")
FITTED_ON = "OPT-350"
TIME_BAR, MEMORY_BAR = 0.06, 0.055
Grids = dict[str, dict[str, np.ndarray]]
GRIDS: Grids = {
    "grad_sync_s": {
        "reduce_efficiency": np.arange(0.2, 1.001, 0.05),
        "step_end_s": np.arange(0.0, 0.0081, 0.0005),
    },
    "step_s": {
        "timing_s": np.arange(0.0, 0.00041, 0.00005),
        "sustained": np.arange(1.0, 1.101, 0.01),
    },
    "peak_memory_bytes": {
        "framework_bytes": np.arange(3e9, 6.01e9, 1e8),
        "transient_layers": np.arange(0.0, 6.01, 0.25),
    },
}


class Constant(Value, frozen=True, kw_only=True):
    """A number that no profile holds."""

    name: str
    value: float
    unit: str
    meaning: str
    source: Source
    fitted_on: str = ""


class Constants(Value, frozen=True, kw_only=True):
    """All of them, by the names of `Overheads`, and the kinds on whose rows they were fitted."""

    kinds: tuple[str, ...]
    constants: tuple[Constant, ...]

    @property
    def overheads(self) -> Overheads:
        return Overheads(**{c.name: c.value for c in self.constants})


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What a row should take."""

    step_s: float
    grad_sync_s: float
    peak_memory_bytes: float
    notes: tuple[str, ...]


def predict(published: Published, row: dict[str, Any], overheads: Overheads) -> Predicted:
    """Price one row. Errors of the data and of the tables pass through."""
    case = case_of(published, row, overheads)
    model = CostModel(fleet=case.fleet, profile=case.profile, trainer=overheads.trainer)
    cost = evaluate(model, case.plan)
    return Predicted(
        step_s=cost.step_s,
        grad_sync_s=cost.step_s - cost.compute_end_s + overheads.step_end_s,
        peak_memory_bytes=max(cost.memory_bytes.values()) + overheads.framework_bytes,
        notes=case.notes,
    )


def exclusions(published: Published) -> dict[str, str]:
    """Rows that the source itself spoils, and why: the synchronisation is no measurement of its own."""
    pairs = {
        r["id"]: (r["measured"].get("grad_sync_s"), r["measured"].get("step_s"))
        for r in published.rows
        if "measured" in r
    }
    equal = {name: sync for name, (sync, step) in pairs.items() if _same(sync, step)}
    found = dict.fromkeys(equal, "grad_sync_s equals step_s")
    for name, (sync, _) in pairs.items():
        if name not in equal and sync in equal.values():
            found[name] = "grad_sync_s is that of a row where it equals step_s"
    return found


def _same(a: float | None, b: float | None) -> bool:
    return a is not None and b is not None and math.isclose(a, b, rel_tol=1e-3)


def table(published: Published, constants: Constants) -> list[dict[str, Any]]:
    """One object a row: measured, predicted, relative errors, what was assumed."""
    overheads = constants.overheads
    left_out = exclusions(published)
    rows = []
    for row in published.rows:
        measured = row.get("measured", {})
        made: dict[str, Any] = {"id": row["id"], "model": row["model"]}
        try:
            predicted, problem = predict(published, row, overheads), ""
        except EvenerError as e:
            predicted, problem = None, "; ".join(x for x in (e.what, e.numbers, e.remedy, e.code) if x)
        for name in GRIDS:
            value, guess = measured.get(name), getattr(predicted, name, None)
            made |= {name: value, f"predicted_{name}": guess}
            made[f"{name.rpartition('_')[0]}_error"] = guess / value - 1 if value and guess else None
        made |= {"excluded": row["id"] in left_out, "excluded_why": left_out.get(row["id"], "")}
        fitted_on = ", ".join(constants.kinds)
        foreign = [
            f"assumed: the constants, fitted on {fitted_on}, hold on {kind}"
            for kind in kinds_of(row)
            if kind not in constants.kinds
        ]
        made |= {"notes": [*(predicted.notes if predicted else ()), *foreign], "problem": problem}
        rows.append(made)
    return rows


def errors(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Absolute relative errors of the rows that count."""
    return [abs(r[f"{name}_error"]) for r in rows if not r["excluded"] and r[f"{name}_error"] is not None]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | int | None]]:
    """Mean and median errors of all rows, and of each model's."""
    found = {}
    for group in ("all", *dict.fromkeys(r["model"] for r in rows)):
        mine = [r for r in rows if group in ("all", r["model"])]
        held = {n: errors(mine, n) for n in ("step", "grad_sync", "peak_memory")}
        found[group] = {"rows": len(held["step"])}
        for name, values in held.items():
            found[group] |= {f"mean_abs_{name}_error": fmean(values) if values else None}
            found[group] |= {f"median_abs_{name}_error": median(values) if values else None}
    return found


def fit(published: Published, constants: Constants, grids: Grids = GRIDS) -> Constants:
    """The constants that bring the least mean absolute error on the rows of `FITTED_ON`.

    One after another: reductions on gradient synchronisation, then layers on step time, then bytes on peak
    memory; each over a grid, the first of equals. UsageError when `published` has no such rows.
    """
    left_out = exclusions(published)
    rows = [r for r in published.rows if r["model"] == FITTED_ON and r["id"] not in left_out]
    if not rows:
        raise UsageError(f"no rows of {FITTED_ON} to fit on", remedy="a file that has some, or no --fit")
    found = dataclasses.asdict(constants.overheads) | {"timing_s": 0.0, "sustained": 1.0}
    for target, grid in grids.items():
        names, axes = tuple(grid), [np.round(g, 9).tolist() for g in grid.values()]
        tried: dict[tuple[float, ...], float] = {}
        for values in itertools.product(*axes):
            overheads = Overheads(**found | dict(zip(names, values, strict=True)))
            tried[values] = mean_error(published, rows, overheads, target)
        best = min(tried, key=lambda at: tried[at])
        found |= dict(zip(names, best, strict=True))
        print(f"{target}: {names} = {best}, mean error {tried[best]:.2%}", file=sys.stderr)
    kinds = sorted({kind for r in rows for kind in kinds_of(r)})
    values = tuple(replace(c, value=found[c.name]) for c in constants.constants)
    return Constants(kinds=tuple(kinds), constants=values)


def mean_error(published: Published, rows: Sequence[dict], overheads: Overheads, target: str) -> float:
    """Mean absolute relative error of `target` over `rows`."""
    guesses = [getattr(predict(published, r, overheads), target) for r in rows]
    return fmean(abs(g / r["measured"][target] - 1) for g, r in zip(guesses, rows, strict=True))


def show(rows: Sequence[dict[str, Any]], constants: Constants, say: Callable[[str], None]) -> None:
    """Measured beside predicted for people."""

    def cell(value: float | None, form: str) -> str:
        return format(value, form) if value is not None else "-"

    heads = ("step s", "predicted", "", "sync s", "predicted", "GiB", "predicted", "")
    say(f"{'row':24}" + "".join(f"{h:>10}" for h in heads))
    for r in rows:
        gib = [x / 2**30 if x else None for x in (r["peak_memory_bytes"], r["predicted_peak_memory_bytes"])]
        cells = [
            cell(r["step_s"], ".3f"),
            cell(r["predicted_step_s"], ".3f"),
            cell(r["step_error"], "+.1%"),
            cell(r["grad_sync_s"], ".3f"),
            cell(r["predicted_grad_sync_s"], ".3f"),
            cell(gib[0], ".2f"),
            cell(gib[1], ".2f"),
            cell(r["peak_memory_error"], "+.1%"),
        ]
        why = r["problem"] or (f"excluded: {r['excluded_why']}" if r["excluded"] else "")
        say(f"{r['id']:24}" + "".join(f"{c:>10}" for c in cells) + f"  {why}")
    for note, ids in _notes(rows).items():
        say(f"{note} ({ids} rows)")
    for c in constants.constants:
        say(f"{c.source}: {c.name} = {c.value:g} {c.unit}: {c.meaning}; on {c.fitted_on}")
    for group, s in summary(rows).items():
        parts = [
            f"{name.replace('_', ' ')} {cell(s[f'mean_abs_{name}_error'], '.2%')} mean "
            f"{cell(s[f'median_abs_{name}_error'], '.2%')} median"
            for name in ("step", "grad_sync", "peak_memory")
        ]
        say(f"{group:14} {s['rows']:3} rows   {'   '.join(parts)}")


def _notes(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for r in rows:
        for note in r["notes"]:
            found[f"{r['model']}: {note}"] = found.get(f"{r['model']}: {note}", 0) + 1
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """0 when both bars are cleared, 1 when one is missed or a row has no prediction, 2 for unusable files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="file of published measurements")
    parser.add_argument("--beside", type=Path, help="file for what it lacks (default: kinds.json beside it)")
    parser.add_argument("--constants", type=Path, default=CONSTANTS, help="table of fitted constants")
    parser.add_argument("--fit", action="store_true", help=f"fit them anew on {FITTED_ON}, write the table")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    try:
        published = read_published(args.data, args.beside)
        constants = read(args.constants, Constants)
        if args.fit:
            constants = fit(published, constants)
            write(args.constants, constants)
        rows = table(published, constants)
    except EvenerError as e:
        print(e, file=sys.stderr)
        return e.exit_code
    show(rows, constants, lambda text: print(text, file=sys.stderr if args.json else sys.stdout))
    groups = summary(rows)
    time, memory = (groups["all"][f"mean_abs_{n}_error"] for n in ("step", "peak_memory"))
    if args.json:
        figures = {"rows": rows, "mean_abs_time_error": time, "mean_abs_memory_error": memory}
        figures |= {"by_model": groups, "constants": msgspec.to_builtins(constants.constants)}
        print(json.dumps(figures))
    passed = time is not None and memory is not None and time <= TIME_BAR and memory <= MEMORY_BAR
    return int(not passed or any(r["problem"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
