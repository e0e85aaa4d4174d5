"""Published runs: a small file with worked numbers, its holes one by one, and the real one where at hand."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks import planner_inputs, published
from benchmarks.published import CONSTANTS, Constants, exclusions, fit, predict, summary, table
from benchmarks.published_data import Published, read_published
from benchmarks.published_rows import Overheads, case_of
from evener.core.files import read
from evener.errors import FileError, UnknownNameError, UsageError

ROOT = Path(__file__).parents[3]
REAL = ROOT.parent / "shared" / "published" / "gh200.json"
NEUTRAL = Overheads(
    timing_s=0.0,
    sustained=1.0,
    reduce_efficiency=1.0,
    step_end_s=0.0,
    framework_bytes=1.0,
    transient_layers=0.0,
)
MB = 10**6


def profile(
    *sizes: int, kind_s: float = 1e-3, update_s: float = 5e-3, tps=(1, 2), layers: int = 4
) -> list[dict]:
    """Equal layers: `kind_s` a sample forward, twice that backward, shared out in a group."""
    return [
        {
            "layer": i,
            "micro_batch": b,
            "tp": tp,
            "forward_s": kind_s * b / tp,
            "backward_s": 2 * kind_s * b / tp,
            "update_s": update_s / tp,
        }
        for i in range(layers)
        for b in sizes
        for tp in tps
    ]


def layer_bytes(layers: int = 4) -> list[dict]:
    """40 MB of parameters a layer, 2 MB out, 12 MB saved with it; a group repeats the output."""
    return [
        {
            "tp": tp,
            "layer": i,
            "param_bytes": 40 * MB // tp,
            "input_bytes_per_sample": 2 * MB,
            "output_bytes_per_sample": 2 * MB,
            "saved_bytes_per_sample": 10 * MB // tp + 2 * MB,
        }
        for i in range(layers)
        for tp in (1, 2)
    ]


def between(kind: str, other: str, gpus: int, gbytes: float) -> dict:
    return {
        "src": kind,
        "src_gpus": gpus,
        "dst": other,
        "dst_gpus": gpus,
        "poly": [0.0, gbytes],
        "peak_bytes_per_s": gbytes * 1e9,
    }


def replica(kind: str = "a", tp: int = 2, gpus: int = 2) -> dict:
    return {"kind": kind, "gpus_per_host": gpus, "tp": tp}


def row(*stages: tuple[list[int], list[dict]], **more) -> dict:
    made = {
        "id": "r",
        "model": "m",
        "data_parallel": len(stages[0][1]),
        "micro_batch": 2,
        "global_batch": 8,
        "hosts": 0,
        "stages": [{"layers": layers, "replicas": replicas} for layers, replicas in stages],
        "measured": {"step_s": 0.1, "grad_sync_s": 0.01, "peak_memory_bytes": 500 * MB},
    }
    return made | more


def files(*rows: dict, **models: dict) -> Published:
    """One file with model m on kind a: 1 GB/s between pairs of hosts, 10 GB/s inside."""
    held = {"m": {"layer_bytes": layer_bytes(), "profile": {"a": profile(1, 2, 4)}}} | models
    links = {
        "within_host": [{"kind": "a", "gpus": 2, "poly": [0.0, 10.0], "peak_bytes_per_s": 1e10}],
        "between_hosts": [between("a", "a", gpus, 1.0) for gpus in (1, 2)],
    }
    return Published(files=[{"models": held, "links": links, "rows": list(rows)}])


WHOLE, CUT = [0, 4], ([0, 2], [2, 4])


def test_one_device_group_alone():
    """4 micro-batches of 2 on 2 devices: 4 layers · 3 ms · 8 / 2, and 4 updates of 2.5 ms."""
    made = predict(files(), row((WHOLE, [replica()])), NEUTRAL)
    assert made.step_s == pytest.approx(4 * 3e-3 * 8 / 2 + 4 * 2.5e-3)
    assert made.grad_sync_s == 0
    held = 4 * 20 * 5 + 2 * (4 * 5 + 2 * 2)  # parameters five times; saved, and what leaves twice, a sample
    assert made.peak_memory_bytes == pytest.approx(held * MB + 1)


def test_transfers_hold_both_ends_and_lanes_share_the_link():
    """One micro-batch through two stages: two transfers of 2 lanes · 4 MB at 1 GB/s, half the updates."""
    cut = row((CUT[0], [replica()]), (CUT[1], [replica()]), global_batch=2)
    whole = row((WHOLE, [replica()]), global_batch=2)
    gap = predict(files(), cut, NEUTRAL).step_s - predict(files(), whole, NEUTRAL).step_s
    assert gap == pytest.approx(2 * 8e-3 - 2 * 2.5e-3)


def test_gradients_go_round_once_all_are_there():
    """Two replicas: 2 rounds of half of 160 MB over 1 GB/s, at half the curve twice that."""
    two = row((WHOLE, [replica(), replica()]))
    made = predict(files(), two, NEUTRAL)
    assert made.grad_sync_s == pytest.approx(0.16)
    half = dict(NEUTRAL.__dict__, reduce_efficiency=0.5, step_end_s=0.01)
    assert predict(files(), two, Overheads(**half)).grad_sync_s == pytest.approx(0.33)


def test_each_constant_moves_its_figure():
    one = row((WHOLE, [replica()]))
    base = predict(files(), one, NEUTRAL)

    def moved(**changed: float):
        return predict(files(), one, Overheads(**(NEUTRAL.__dict__ | changed)))

    assert moved(sustained=1.1).step_s - base.step_s == pytest.approx(0.1 * 48e-3)
    assert moved(timing_s=1e-4).step_s - base.step_s == pytest.approx(-4 * 4 * 2 * 1e-4)
    assert moved(framework_bytes=1e9).peak_memory_bytes - base.peak_memory_bytes == pytest.approx(1e9 - 1)
    assert moved(transient_layers=3.0).peak_memory_bytes - base.peak_memory_bytes == pytest.approx(
        2 * 3 * 5 * MB
    )


def test_micro_batches_inside_and_outside_the_profile():
    inside = predict(files(), row((WHOLE, [replica()]), micro_batch=3, global_batch=3), NEUTRAL)
    assert inside.step_s == pytest.approx(4 * 3e-3 * 3 / 2 + 1e-2)
    assert inside.notes == ()
    far = predict(files(), row((WHOLE, [replica()]), micro_batch=12, global_batch=12), NEUTRAL)
    assert far.step_s == pytest.approx(4 * 3e-3 * 12 / 2 + 1e-2)
    assert "micro-batch 12 on a in proportion to 4" in far.notes[0]


def test_a_larger_micro_batch_bounds_a_smaller_one():
    data = files()
    for r in data.files[0]["models"]["m"]["profile"]["a"]:
        if r["micro_batch"] == 1:
            r["forward_s"] *= 100
    step = predict(data, row((WHOLE, [replica()]), micro_batch=1, global_batch=1), NEUTRAL).step_s
    assert step == pytest.approx(4 * (2e-3 + 2e-3) / 2 + 1e-2)  # forward as at micro-batch 2


def test_an_unknown_degree_shares_out_the_work():
    made = predict(files(), row((WHOLE, [replica(tp=4, gpus=4)])), NEUTRAL)
    assert made.step_s == pytest.approx(4 * 3e-3 * 8 / 4 + 4 * 5e-3 / 4)
    assert "a in groups of 4 as those of 2" in made.notes[0]


def test_groups_are_packed_where_the_row_lists_fewer_hosts():
    four = [replica(tp=1, gpus=2) for _ in range(4)]
    packed = case_of(files(), row((WHOLE, four), hosts=2), NEUTRAL)
    assert sorted({d.host for d in packed.fleet.devices}) == ["host0", "host1"]
    spread = case_of(files(), row((WHOLE, four), hosts=4), NEUTRAL)
    assert len({d.host for d in spread.fleet.devices}) == 4
    odd = case_of(files(), row((WHOLE, four), hosts=3), NEUTRAL)
    assert any("the row lists 3" in note for note in odd.notes)


def test_mixed_kinds_in_one_row():
    """The slower kind sets the pace; the link between kinds is the slower of both directions."""
    data = files()
    data.files[0]["models"]["m"]["profile"]["b"] = profile(1, 2, 4, kind_s=3e-3)
    data.files[0]["links"]["between_hosts"] += [between("a", "b", 2, 0.5), between("b", "a", 2, 0.25)]
    made = predict(data, row((WHOLE, [replica(), replica("b")])), NEUTRAL)
    assert made.grad_sync_s == pytest.approx(0.16 / 0.25)
    assert made.step_s == pytest.approx(4 * 9e-3 * 4 / 2 + 1e-2 + 0.64)


def test_unknown_links_are_assumed_aloud_or_refused():
    data = files()
    data.files[0]["models"]["m"]["profile"]["b"] = profile(1, 2, 4)
    pair = row((WHOLE, [replica("a"), replica("b")]))
    assert "assumed: 2 a to 2 b as 2 a to 2 a" in predict(data, pair, NEUTRAL).notes
    data.files[0]["links"] = {}
    with pytest.raises(UnknownNameError, match="no link from a to b"):
        predict(data, pair, NEUTRAL)
    alone = predict(data, row((WHOLE, [replica()])), NEUTRAL)
    assert alone.step_s > 0, "a row that sends nothing needs no link"


def test_missing_updates_are_taken_from_the_nearest_kind():
    data = files()
    held = data.files[0]["models"]["m"]["profile"]
    held["b"] = profile(1, 2, 4, kind_s=2e-3, update_s=0.0)
    made = predict(data, row((WHOLE, [replica("b")])), NEUTRAL)
    assert made.step_s == pytest.approx(4 * 6e-3 * 8 / 2 + 2 * 1e-2)
    assert any("updates on b in groups of 2 are those on a" in n for n in made.notes)
    del held["a"]
    lone = predict(Published(files=data.files), row((WHOLE, [replica("b")])), NEUTRAL)
    assert lone.step_s == pytest.approx(4 * 6e-3 * 8 / 2)
    assert any("take no time, none is known" in n for n in lone.notes)


def test_a_profile_of_another_model_is_carried_over():
    """Kind b's own rows have 3 layers for a model of 4: seconds come from a, by another model's ratio."""
    other = {
        "layer_bytes": layer_bytes(3),
        "profile": {"a": profile(1, 2, 4, layers=3), "b": profile(1, 2, 4, kind_s=2e-3, layers=3)},
    }
    data = files(other=other)
    data.files[0]["models"]["m"]["profile"]["b"] = profile(1, 2, 4, layers=3)
    made = predict(data, row((WHOLE, [replica("b")])), NEUTRAL)
    assert made.step_s == pytest.approx(4 * 6e-3 * 8 / 2 + 1e-2)
    assert any("carried over from a by the ratio of other" in n for n in made.notes)


def test_the_file_beside_fills_in(tmp_path):
    data = files(row((WHOLE, [replica("b")]))).files[0]
    beside = copy.deepcopy(data)
    beside["models"]["m"]["profile"] = {"b": profile(1, 2, 4, kind_s=2e-3)}
    (tmp_path / "runs.json").write_text(json.dumps(data))
    (tmp_path / "kinds.json").write_text(json.dumps(beside))
    made = table(read_published(tmp_path / "runs.json"), read(CONSTANTS, Constants))[0]
    assert made["problem"] == ""
    assert "b: groups of 2 are from the file beside" in made["notes"]
    assert any(n.startswith("assumed: the constants, fitted on GH-96, hold on b") for n in made["notes"])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (row(([0, 3], [replica()]), ([2, 4], [replica()])), "placed twice"),
        (row((WHOLE, [replica("z")])), "no layer times of 'm' on 'z'"),
        (row((WHOLE, [replica()]), model="n"), "no layers of 'n'"),
        (row((WHOLE, [replica()]), global_batch=None), "makes no plan"),
    ],
)
def test_a_row_that_cannot_be_priced_says_why_and_stops_no_other(broken, message):
    rows = table(files(broken, row((WHOLE, [replica()]), id="good")), read(CONSTANTS, Constants))
    assert message in rows[0]["problem"] and rows[0]["predicted_step_s"] is None
    assert rows[1]["predicted_step_s"] > 0
    assert summary(rows)["all"]["rows"] == 1


def test_spoilt_rows_are_excluded_and_slow_links_are_not():
    def measured(name: str, step: float, sync: float) -> dict:
        return row((WHOLE, [replica()]), id=name, measured={"step_s": step, "grad_sync_s": sync})

    data = files(
        measured("equal", 1.06, 1.06), measured("copied", 1.3, 1.06), measured("slow link", 1.3, 1.2)
    )
    assert set(exclusions(data)) == {"equal", "copied"}


def test_broken_files_and_fits_without_rows(tmp_path, capsys):
    (tmp_path / "x.json").write_text('{"models": 3}')
    with pytest.raises(FileError):
        read_published(tmp_path / "x.json")
    assert published.main(["--data", str(tmp_path / "x.json")]) == 2
    assert "EV101" in capsys.readouterr().err
    with pytest.raises(UsageError, match="no rows of OPT-350"):
        fit(files(), read(CONSTANTS, Constants))


needs_the_real_file = pytest.mark.skipif(not REAL.exists(), reason="published measurements are not at hand")


@needs_the_real_file
def test_the_real_file_without_torch_clears_both_bars():
    code = (
        "import sys; sys.modules['torch'] = None; from benchmarks import published; "
        f"sys.exit(published.main(['--data', {str(REAL)!r}, '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["mean_abs_time_error"] <= 0.06
    assert figures["mean_abs_memory_error"] <= 0.055
    assert [r["id"] for r in figures["rows"] if r["excluded"]] == ["GPT-NEO/N4_D4", "OPT-350/N4_D4"]
    assert len(figures["rows"]) == 27 and not any(r["problem"] for r in figures["rows"])
    named = {
        "id",
        "step_s",
        "predicted_step_s",
        "peak_memory_bytes",
        "predicted_peak_memory_bytes",
        "excluded",
    }
    assert all(named <= set(r) for r in figures["rows"])


@needs_the_real_file
def test_the_constants_are_a_best_fit_to_the_rows_they_name_and_to_no_others():
    data = read_published(REAL)
    for r in data.rows:
        if r["model"] != published.FITTED_ON:
            r["measured"] = {"step_s": 1.0, "grad_sync_s": 0.5, "peak_memory_bytes": 1}
    held = read(CONSTANTS, Constants)
    steps = {name: axis[1] - axis[0] for grid in published.GRIDS.values() for name, axis in grid.items()}
    values = {c.name: c.value for c in held.constants}
    near = {
        target: {name: values[name] + steps[name] * published.np.array([-1.0, 0.0, 1.0]) for name in grid}
        for target, grid in published.GRIDS.items()
    }
    start = replace(held, constants=tuple(replace(c, value=c.value * 1.5) for c in held.constants))
    found = fit(data, start, near)
    assert {c.name: c.value for c in found.constants} == pytest.approx(values)
    assert found.kinds == held.kinds
    assert {c.source for c in found.constants} == {"fitted"}


@needs_the_real_file
def test_the_planner_takes_published_profiles(capsys):
    kinds = REAL.parent / "kinds.json"
    arguments = ["--data", str(kinds), "--model", "OPT-350", "--fleet", "one host A100-40, one V100-16"]
    assert planner_inputs.main([*arguments, "--json"]) == 0
    case = json.loads(capsys.readouterr().out.splitlines()[-1])["cases"][0]
    assert case["status"] in ("proven", "within")
    assert case["predicted_step_s"] >= case["bound_step_s"] > 0
    assert case["used"]["A100-40"] == 4
