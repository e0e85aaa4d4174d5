"""Which checkpoint, and which run, are meant."""

import os
from pathlib import Path

import pytest

from evener.core.records import StepRecord
from evener.errors import StateError, UsageError
from evener.report.metrics import MetricsWriter
from evener.session.ask import request_for
from evener.session.checkpoints.resume import LATEST, check_folder, choose, latest_run, seed_of, stopped
from tests.checkpoints import save


def test_a_checkpoint_a_run_and_the_latest_are_told_apart(tmp_path: Path) -> None:
    first, second = save(tmp_path, 8).path, save(tmp_path, 16).path
    assert choose(str(first), tmp_path).path == str(first)
    assert choose(str(tmp_path), Path("elsewhere")).path == str(second)
    assert choose(LATEST, tmp_path).path == str(second)
    (second / "manifest.json").write_text("")
    assert choose(LATEST, tmp_path).path == str(first)
    assert "passed over samples-000000000016: " in choose(LATEST, tmp_path).notes[0]
    with pytest.raises(StateError, match="damaged"):
        choose(str(second), tmp_path)


def test_a_checkpoint_that_is_not_there_is_told_beside_those_that_are(tmp_path: Path) -> None:
    newest = save(tmp_path, 8).path
    with pytest.raises(UsageError, match="has no checkpoint") as e:
        choose(str(newest.parent / "step-1"), tmp_path)
    assert e.value.numbers == f"{newest.parent} has samples-000000000008 (step 1)"
    next(newest.glob("shard*")).unlink()
    save(tmp_path, 0)
    assert "passed over samples-000000000008 (step 1): " in choose(LATEST, tmp_path).notes[0]


def test_nothing_there_begins_a_run_only_for_the_latest(tmp_path: Path) -> None:
    assert choose(LATEST, tmp_path).path == "" and "from the beginning" in choose(LATEST, tmp_path).notes[0]
    with pytest.raises(UsageError, match="has no checkpoint"):
        choose(str(tmp_path), tmp_path)
    save(tmp_path, 8)
    for shard in tmp_path.rglob("shard*"):
        shard.unlink()
    with pytest.raises(StateError, match="is good"):
        choose(LATEST, tmp_path)


def test_the_latest_run_is_the_newest_with_a_checkpoint(tmp_path: Path) -> None:
    for number, name in enumerate(["text-20260101-000000", "text-20260102-000000", "other-20260103-000000"]):
        save(tmp_path / name, 8)
        os.utime(tmp_path / name, (number, number))
    (tmp_path / "text-20260104-000000").mkdir()
    assert latest_run("text", str(tmp_path)) == tmp_path / "text-20260102-000000"
    assert latest_run("[t]ext", str(tmp_path)) is None


def test_the_command_line_goes_on_in_the_runs_own_folder_with_its_seed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EVENER_RUNS", str(tmp_path))
    script = tmp_path / "text.py"
    script.write_text("")
    wanted = {"fleet": None, "rehearse": None, "devices": None, "batch": None, "batch_per_device": None}
    request = request_for(script, resume=LATEST, **wanted)
    assert Path(request.run_dir).name.startswith("text-") and request.seed == 0
    save(tmp_path / "text-20260101-000000", 8, seed=7)
    request = request_for(script, resume=LATEST, **wanted)
    assert request.run_dir == str(tmp_path / "text-20260101-000000") and request.seed == 7
    assert seed_of(request.run_dir, tmp_path) == 7
    assert request_for(script, resume=LATEST, seed=3, **wanted).seed == 3


def test_a_folder_with_another_run_begins_none(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    newest = save(run, 8).path
    save(other, 8)
    with pytest.raises(UsageError, match="holds another run") as e:
        check_folder(run, None)
    assert "1 checkpoint, the newest" in e.value.numbers
    assert e.value.remedy.startswith("--resume latest goes on") and "another --run-dir" in e.value.remedy
    for goes_on in (LATEST, str(run), str(newest)):
        check_folder(run, goes_on)
    with pytest.raises(UsageError, match="holds another run"):
        check_folder(run, str(other))
    check_folder(tmp_path / "none", None)


def test_metrics_alone_are_a_run_and_nothing_goes_on_from_them(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    check_folder(tmp_path, None)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match="holds another run") as e:
        check_folder(tmp_path, None)
    assert e.value.numbers == "metrics.jsonl" and "--resume" not in e.value.remedy


def test_who_ends_a_run_is_told_how_far_it_came_and_how_it_goes_on(tmp_path: Path) -> None:
    assert stopped(tmp_path / "none", "job.py") == "stopped before the first step"
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.append(StepRecord(step=11, samples=8, step_s=1.0, loss=1.0, lr=0.1, seconds={}))
    told = stopped(tmp_path, "job.py")
    assert told.startswith(f"stopped after step 12; files: {tmp_path}; no checkpoint") and "every" in told
    asked = stopped(tmp_path, "job.py", saves=True)
    assert asked.endswith("no checkpoint was saved: it was ended before there was one")
    save(tmp_path, 8)
    assert "is samples-000000000008 (step 1): evener train job.py --run-dir" in stopped(tmp_path, "job.py")
