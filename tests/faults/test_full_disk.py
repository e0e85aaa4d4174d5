"""A disk that is full while a run trains: told once, and it costs files, not the training."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from evener.core.files import write
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.records import StepRecord
from evener.errors import FileError
from evener.report.metrics import MetricsWriter, read_metrics

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import torch, evener as ev
from torch import nn

def recipe():
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 5), torch.randint(0, 3, (64,)))
    model = nn.Sequential(nn.Linear(5, {width}), nn.Tanh(), nn.Linear({width}, 3))
    return ev.Recipe(model=model, dataset=data, loss=nn.CrossEntropyLoss(), global_batch=8,
                     optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
"""
ROOM = 8000  # bytes that a file may have: enough for plan and model, for neither metrics nor trace


def trained(tmp_path: Path, width: int) -> tuple[int, str]:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT.format(width=width))
    stage = Stage(layers=("0", "1", "2"), shares=(Share(devices=("lab/a",), samples=8),))
    pipeline = Pipeline(samples=8, micro_batch=8, stages=(stage,))
    write(tmp_path / "plan.json", Plan(global_batch=8, pipelines=(pipeline,)))
    write(tmp_path / "fleet.json", Fleet(devices=(Device(name="lab/a", kind="cpu", threads=1),)))
    command = [sys.executable, "-m", "evener.cli.main", "train", str(script), "--steps", "60"]
    command += ["--fleet", str(tmp_path / "fleet.json"), "--plan", str(tmp_path / "plan.json")]
    command += ["--run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM)),
    )
    return done.returncode, done.stderr


def test_a_run_goes_on_and_tells_once_what_finds_no_room(tmp_path) -> None:
    code, told = trained(tmp_path, width=7)
    assert code == 0, told
    assert told.count("metrics.jsonl: File too large; the training goes on without it") == 1
    there = read_metrics(tmp_path / "run" / "metrics.jsonl")
    steps = [r.step for r in there.records]
    assert steps == list(range(len(steps))) and not there.torn
    assert f"metrics.jsonl lacks the last {60 - len(steps)} steps" in told
    assert len(load_file(tmp_path / "run" / "model.safetensors")) == 4


def test_a_model_that_finds_no_room_is_an_error_that_names_it(tmp_path) -> None:
    code, told = trained(tmp_path, width=700)
    assert code == 2 and "EV101" in told and "Traceback" not in told
    assert f"cannot write {tmp_path / 'run' / 'model.safetensors'}" in told
    assert not list((tmp_path / "run").glob("*model.safetensors*"))


def test_a_record_is_whole_or_not_there_and_closing_is_quiet(tmp_path) -> None:
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    record = StepRecord(
        step=0, samples=8, step_s=1.0, loss=2.0, lr=1e-3, seconds={"a" * 200: {"compute": 1.0}}
    )
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.append(record)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, hard))
    try:
        with pytest.raises(FileError, match="File too large"):
            writer.append(record)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
    writer.append(record)
    writer.close()
    assert read_metrics(tmp_path / "metrics.jsonl").records == (record, record)
