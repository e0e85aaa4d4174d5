"""Processes are killed while they save: a device of several, and the whole job; the curve stays one curve."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evener.core.files import write
from evener.runtime.checkpoints.folder import checkpoints_in, newest_good
from evener.session.launching.launch import launch
from tests.local.checkpoint_jobs import ONE, TWO, losses, request_for

NORM = "LayerNorm(8)"


def undisturbed(folder: Path, steps: int) -> dict[int, float]:
    """The losses of the same steps on one device."""
    launch(request_for(folder, ONE, steps=steps, norm=NORM, evaluate=False))
    return losses(folder)


def test_the_survivor_saves_alone_and_the_run_can_be_taken_up(tmp_path: Path) -> None:
    """The second device is killed when the first checkpoint is there; every second step is saved."""
    wishes = {"norm": NORM, "evaluate": False}
    deadly = f"Deadly(words(27, 1), 1, {str(tmp_path)!r})"
    outcome = launch(request_for(tmp_path, TWO, steps=100, every=2, data=deadly, keep=99, **wishes))
    assert any("lab/b" in d for d in outcome.decisions), outcome.decisions
    found, passed = newest_good(tmp_path)
    assert found is not None and passed == () and found.manifest.position.step == 100
    assert [s.device for s in found.manifest.shards] == ["lab/a"]
    assert len(checkpoints_in(tmp_path)[-1].manifest.shards) == 2
    assert not [p.name for p in found.path.parent.iterdir() if p.name.startswith(".")]
    launch(request_for(tmp_path, TWO, steps=110, every=9, resume="latest", **wishes))
    assert losses(tmp_path) == pytest.approx(undisturbed(tmp_path / "alone", 110), rel=1e-9)


def start(folder: Path, *, steps: int) -> subprocess.Popen:
    """The command line that begins a run and takes it up again."""
    request = request_for(folder, TWO, steps=steps, norm=NORM)
    write(folder / "fleet.json", request.fleet)
    write(folder / "the-plan.json", TWO)
    command = [sys.executable, "-m", "evener.cli.main", "train", str(request.script), "--no-heldout"]
    command += ["--fleet", str(folder / "fleet.json"), "--plan", str(folder / "the-plan.json")]
    command += ["--run-dir", str(folder), "--steps", str(steps), "--quiet", "--json"]
    command += ["--checkpoint-every", "1", "--keep-every", "7", "--resume", "latest"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kill_while_saving(process: subprocess.Popen, folder: Path) -> None:
    """SIGKILL for the command when a checkpoint is under way and another is there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        if list((folder / "checkpoints").glob("samples-*")) and list(
            (folder / "checkpoints").glob(".*partial")
        ):
            process.send_signal(signal.SIGKILL)
            process.wait()
            return
        time.sleep(0.0005)
    process.kill()
    raise AssertionError("no checkpoint was seen under way")


def test_the_whole_job_is_killed_and_taken_up_by_the_same_command(tmp_path: Path) -> None:
    """Only the number of steps is another, so that the first cannot come to its end."""
    kill_while_saving(start(tmp_path, steps=100_000), tmp_path)
    found, _ = newest_good(tmp_path)
    assert found is not None
    steps = found.manifest.position.step + 20
    process = start(tmp_path, steps=steps)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    told = json.loads(out.splitlines()[-1])["decisions"]
    assert any("taken up at step" in d for d in told)
    after = losses(tmp_path)
    assert sorted(after) == list(range(steps))
    assert after == pytest.approx(undisturbed(tmp_path / "alone", steps), rel=1e-9)
    assert newest_good(tmp_path)[0].manifest.position.step == steps
    assert not [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith(".")]
