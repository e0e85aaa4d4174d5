"""torchrun's own elastic launching: it ends all processes when one dies, and starts them again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from evener.report.metrics import read_metrics
from evener.session.journal import Outcome
from tests.faults.jobs import SCRIPT, error_of


@pytest.mark.timeout(180)
def test_a_job_that_torchrun_starts_again_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Story: torchrun keeps its store over a restart, and the new processes met the old ones' addresses."""
    script, run = tmp_path / "job.py", tmp_path / "run"
    script.write_text(SCRIPT.format(dtype="double", pause_s=0.004))
    metrics = run / "metrics.jsonl"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--max-restarts", "1", "-m", "evener.cli.main", "train", str(script), "--devices", "cpu,cpu"),
        *("--steps", "60", "--checkpoint-every", "10", "--resume", "latest", "--run-dir", str(run)),
        *("--micro-batch", "6", "--no-adapt", "--quiet"),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "told").open("w") as told:
        job = subprocess.Popen(command, stderr=told, stdout=told, env=environment)
        try:
            while not metrics.exists() or metrics.read_bytes().count(b"\n") < 25:
                assert job.poll() is None, (tmp_path / "told").read_text()[-3000:]
                time.sleep(0.02)
            victim = psutil.Process(job.pid).children()[-1]
            os.kill(victim.pid, signal.SIGKILL)
            assert job.wait(120) == 0, (tmp_path / "told").read_text()[-3000:]
        finally:
            for process in [*psutil.Process(job.pid).children(recursive=True)] if job.poll() is None else []:
                process.kill()
            job.kill()
            job.wait()
    assert [r.step for r in read_metrics(metrics).records] == list(range(60))
    assert error_of(Outcome(report=None, plan=None, run_dir=str(run)), 60) <= 1e-12  # type: ignore[arg-type]
