"""Ctrl-C and SIGTERM at any moment: an exit code, one line at most, no traceback, and no process left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import psutil
import pytest

from evener.core.files import write
from evener.core.fleet import Device, Fleet
from tests.faults.test_lost_at_the_start import SCRIPT

pytestmark = pytest.mark.timeout(120)
TRAIN = ["--steps", "100000", "--batch-per-device", "8", "--checkpoint-every", "100000"]


def stopped(
    tmp_path: Path,
    words: list[str],
    what: signal.Signals,
    *,
    until: Callable[[psutil.Process, TextIO], bool],
    after_s: float,
    to_all: bool = True,
) -> tuple[int, str]:
    """(exit code, what was told after the signal) of a command; the signal goes `to_all` of its group."""
    (tmp_path / "job.py").write_text(SCRIPT)
    write(tmp_path / "fleet.json", Fleet(devices=(Device(name="lab/a", kind="cpu", threads=1),)))
    command = [sys.executable, "-m", "evener.cli.main", *words, "--fleet", str(tmp_path / "fleet.json")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as job:
        assert job.stderr is not None
        process = psutil.Process(job.pid)
        while not until(process, job.stderr):
            assert job.poll() is None, job.stderr.read()
            time.sleep(0.005)
        time.sleep(after_s)
        everyone = [process, *process.children(recursive=True)]
        (os.killpg if to_all else os.kill)(job.pid, what)
        after = job.stderr.read()
    assert not psutil.wait_procs(everyone, timeout=5)[1]
    return job.returncode, after


def imports_numpy(process: psutil.Process, told: TextIO) -> bool:
    """As torch does first of all."""
    return any("numpy" in m.path for m in process.memory_maps())


def has_a_fork_server(process: psutil.Process, told: TextIO) -> bool:
    return any("forkserver" in " ".join(p.cmdline()) for p in process.children())


def takes_steps(process: psutil.Process, told: TextIO) -> bool:
    return "step 1/" in told.readline()


@pytest.mark.parametrize("after_s", [0.0, 0.2, 1.0])
def test_ctrl_c_while_torch_is_imported(tmp_path: Path, after_s: float) -> None:
    words = ["train", str(tmp_path / "job.py"), "--run-dir", str(tmp_path / "run"), *TRAIN]
    code, after = stopped(tmp_path, words, signal.SIGINT, until=imports_numpy, after_s=after_s)
    assert code == 130 and "Traceback" not in after and "EV000" not in after, after


@pytest.mark.parametrize("after_s", [0.5, 2.0])
def test_ctrl_c_while_the_fork_server_loads(tmp_path: Path, after_s: float) -> None:
    words = ["verify", str(tmp_path / "job.py")]
    code, after = stopped(tmp_path, words, signal.SIGINT, until=has_a_fork_server, after_s=after_s)
    assert code == 130 and after == "", after


@pytest.mark.parametrize(
    ("what", "wanted", "to_all"),
    [(signal.SIGINT, 130, True), (signal.SIGTERM, 143, False), (signal.SIGTERM, 143, True)],
)
def test_who_ends_a_training_is_told_how_it_goes_on(
    tmp_path: Path, what: signal.Signals, wanted: int, to_all: bool
) -> None:
    """SIGTERM to all, as batch systems send it, ended the fork server, and with it the last checkpoint."""
    run = tmp_path / "run"
    words = ["train", str(tmp_path / "job.py"), "--run-dir", str(run), *TRAIN]
    code, after = stopped(tmp_path, words, what, until=takes_steps, after_s=1.0, to_all=to_all)
    assert code == wanted and "Traceback" not in after, after
    assert "evener: stopped after step" in after and "the newest checkpoint is" in after, after
    assert f"--run-dir {run} --resume latest, with the options it had, goes on from it" in after, after
    assert "saves a checkpoint, then ends" in after, after  # none was due: up to 99,999 steps were lost
    assert list(run.glob("checkpoints/*/manifest.json")), after
