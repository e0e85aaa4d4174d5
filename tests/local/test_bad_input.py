"""What goes wrong in a run ends it within ten seconds, with one error that names the device and the cause."""

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from evener import errors
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.session.launching.launch import launch
from evener.session.request import Request
from tests.local.runs import cpus, run_of

DEVICES = ("lab/a", "lab/b")
SCRIPT = """
import os, time, torch, evener as ev
from torch import nn

class Data:
    def __len__(self): return 64
    def __getitem__(self, i):
        {in_data}
        return torch.full((5,), float(i)), i % 3

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(5, 3)
    def forward(self, x):
        {in_forward}
        return self.line(x)

def loss(output, target):
    value = nn.functional.cross_entropy(output, target)
    {in_loss}
    return value

def recipe():
    {in_recipe}
    return ev.Recipe(model=Net(), dataset=Data(), loss=loss, global_batch=8, workers={workers},
                     optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
"""


def plan_for(devices: tuple[str, ...] = DEVICES, samples: tuple[int, ...] = (6, 2)) -> Plan:
    return Plan(
        global_batch=sum(samples),
        pipelines=tuple(
            Pipeline(
                samples=n,
                micro_batch=2,
                stages=(Stage(layers=("line",), shares=(Share(devices=(d,), samples=2),)),),
            )
            for d, n in zip(devices, samples, strict=True)
        ),
    )


def request_for(
    folder: Path,
    *,
    plan: Plan | None = None,
    steps: int = 3,
    workers: int = 0,
    elastic: bool = True,
    **code: str,
):
    parts = dict.fromkeys(("in_data", "in_forward", "in_loss", "in_recipe"), "pass") | code
    text = SCRIPT.format(workers=workers, **parts)
    fleet = cpus(DEVICES)
    return run_of(folder, text, plan or plan_for(), steps=steps, elastic=elastic, fleet=fleet)


def error_of(request: Request) -> errors.EvenerError:
    """The error that ends the run, which must come soon and leave no process of a device behind."""
    start = time.monotonic()
    with pytest.raises(errors.EvenerError) as caught:
        launch(request)
    assert time.monotonic() - start < 10
    left = [p for p in _descendants() if any(n in " ".join(p.cmdline()) for n in DEVICES)]
    assert not left
    return caught.value


def _descendants() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def test_a_run_that_is_right_ends_well(tmp_path: Path) -> None:
    outcome = launch(request_for(tmp_path))
    assert outcome.parameters_agree
    assert {p.name for p in tmp_path.iterdir()} >= {"plan.json", "metrics.jsonl", "trace.json", "report.json"}


def test_a_model_that_fails_on_one_device_is_named_with_its_device(tmp_path: Path) -> None:
    bad = "if os.environ['RANK'] == '1': raise RuntimeError('no such kernel')"
    error = error_of(request_for(tmp_path, in_forward=bad))
    assert isinstance(error, errors.ModelError)
    assert "lab/b" in str(error) and "no such kernel (job.py:" in str(error) and "forward" in str(error)
    assert "samples of the dataset: " in error.numbers


def test_a_nan_on_one_device_names_it(tmp_path: Path) -> None:
    error = error_of(
        request_for(tmp_path, in_loss="if os.environ['RANK'] == '1': value = value * float('nan')")
    )
    assert isinstance(error, errors.NonFiniteError)
    assert "lab/b" in str(error) and "lab/a" not in error.what
    assert error.remedy.startswith("weight= where labels may be ignored")  # else their mean may be 0 / 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_raises_is_named_with_its_error(tmp_path: Path, workers: int) -> None:
    error = error_of(
        request_for(tmp_path, steps=8, workers=workers, in_data="if i == 7: raise KeyError('row 7')")
    )
    assert isinstance(error, errors.DataError)
    assert "row 7" in str(error) and "lab/" in str(error) and "(job.py:" in str(error)
    assert "dataset[7] fails" in error.numbers


def test_an_empty_dataset_is_refused(tmp_path: Path) -> None:
    error = error_of(request_for(tmp_path, in_recipe="Data.__len__ = lambda self: 0"))
    assert isinstance(error, errors.DataError) and "empty" in str(error)


def test_a_script_that_raises_is_named_with_its_line(tmp_path: Path) -> None:
    error = error_of(request_for(tmp_path, in_recipe="raise ValueError('no weights here')"))
    assert isinstance(error, errors.ModelError)
    assert "job.py:" in str(error) and "no weights here" in str(error)


def test_a_plan_for_other_devices_is_refused(tmp_path: Path) -> None:
    error = error_of(request_for(tmp_path, plan=plan_for(("lab/a", "lab/z"))))
    assert isinstance(error, errors.PlanMismatchError)
    assert "lab/z" in str(error) and "lab/b" in str(error)


def test_a_plan_for_another_batch_is_refused(tmp_path: Path) -> None:
    error = error_of(request_for(tmp_path, plan=plan_for(samples=(6, 4))))
    assert isinstance(error, errors.PlanMismatchError)
    assert "10" in str(error) and "8" in str(error)


def test_a_killed_process_is_named(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    slow = f"open({str(marker)!r}, 'w').write(str(os.getpid())) if os.environ['RANK'] == '1' else None; " + (
        "time.sleep(0.02)"
    )

    def kill() -> None:
        while not marker.exists() or not marker.read_text():
            time.sleep(0.01)
        os.kill(int(marker.read_text()), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    error = error_of(request_for(tmp_path, steps=2000, in_forward=slow, elastic=False))
    thread.join()
    assert isinstance(error, errors.PeerLostError)
    assert "lab/b" in str(error) and "SIGKILL" in str(error)


def test_memory_that_runs_out_makes_micro_batches_smaller_and_loses_no_sample(tmp_path: Path) -> None:
    bad = "if os.environ['RANK'] == '0' and len(x) > 1: raise torch.OutOfMemoryError('full')"
    outcome = launch(request_for(tmp_path, in_forward=bad))
    assert outcome.parameters_agree
    assert [p.micro_batch for p in outcome.plan.pipelines] == [1, 2]
    assert any("lab/a ran out of memory" in sentence for sentence in outcome.decisions)


def test_memory_that_never_suffices_ends_the_run(tmp_path: Path) -> None:
    bad = "if os.environ['RANK'] == '0': raise torch.OutOfMemoryError('full')"
    error = error_of(request_for(tmp_path, in_forward=bad))
    assert isinstance(error, errors.OutOfMemoryError) and "lab/a" in str(error)


def test_a_plan_with_tensor_parallel_groups_is_refused(tmp_path: Path) -> None:
    """Both devices of a group once computed every sample, and its gradient counted twice, silently."""
    share = Share(devices=DEVICES, samples=8)
    stage = Stage(layers=("line",), shares=(share,))
    plan = Plan(global_batch=8, pipelines=(Pipeline(samples=8, micro_batch=8, stages=(stage,)),))
    error = error_of(request_for(tmp_path, plan=plan))
    assert isinstance(error, errors.PlanMismatchError) and "tensor-parallel" in str(error)
