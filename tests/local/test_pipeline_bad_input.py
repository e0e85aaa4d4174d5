"""What goes wrong in a pipeline ends it soon, with one error that names device, stage or layer."""

import os
import signal
import threading
import time
from pathlib import Path

import msgspec
import pytest

from evener import errors
from evener.core.files import decode, encode
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.session.launching.launch import launch
from evener.session.request import Request
from tests.local.runs import cpus, run_of
from tests.local.test_bad_input import error_of

DEVICES = ("lab/a", "lab/b", "lab/c")
SCRIPT = """
import os, time, torch, evener as ev
from torch import nn

class Data:
    def __len__(self): return 64
    def __getitem__(self, i):
        {in_data}
        return torch.full((5,), float(i)), i % 3

class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(5, 5)
    def forward(self, x):
        {in_middle}
        return self.line(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 5), Middle(), nn.Linear(5, 3)
    def forward(self, x):
        {in_forward}
        return self.last(self.middle(self.first(x)))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def recipe():
    return ev.Recipe(model=Net(), dataset=Data(), loss=loss, global_batch=8,
                     optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
"""


def plan_of(*layers: str) -> Plan:
    stages = tuple(
        Stage(layers=tuple(row.split()), shares=(Share(devices=(d,), samples=2),))
        for row, d in zip(layers, DEVICES, strict=False)
    )
    return Plan(
        global_batch=8, pipelines=(Pipeline(samples=8, micro_batch=2, stages=stages),), schedule="1f1b"
    )


THREE = plan_of("first", "middle", "last")


def request_for(
    folder: Path, plan: Plan = THREE, steps: int = 3, *, elastic: bool = True, **code: str
) -> Request:
    parts = dict.fromkeys(("in_data", "in_middle", "in_forward"), "pass") | code
    text = SCRIPT
    for name, value in parts.items():
        text = text.replace("{" + name + "}", value)
    return run_of(folder, text, plan, steps=steps, elastic=elastic, fleet=cpus(plan.devices))


def test_a_pipeline_that_is_right_ends_well(tmp_path: Path) -> None:
    assert launch(request_for(tmp_path)).parameters_agree


def test_a_stage_that_fails_is_named_with_its_device(tmp_path: Path) -> None:
    # 2 samples only reach the middle layer in steps; the cut is made with other numbers.
    error = error_of(request_for(tmp_path, in_middle="if len(x) == 2: raise RuntimeError('no such kernel')"))
    assert isinstance(error, errors.ModelError)
    assert "forward of stage 1, in module 'middle', on lab/b: RuntimeError: no such kernel" in error.what
    assert "1F0" in error.numbers


def test_a_backward_that_fails_is_named_with_its_stage(tmp_path: Path) -> None:
    bad = """
        def fail(gradient): raise RuntimeError('no such kernel')
        if len(x) == 2: x = x * 1; x.register_hook(fail)
"""
    error = error_of(request_for(tmp_path, in_middle=bad))
    assert isinstance(error, errors.ModelError)
    assert "backward of stage 1 on lab/b" in error.what and "no such kernel" in error.what


def test_a_dataset_that_raises_under_a_pipeline_is_named(tmp_path: Path) -> None:
    error = error_of(request_for(tmp_path, in_data="if i == 7: raise KeyError('row 7')", steps=8))
    assert isinstance(error, errors.DataError)
    assert "row 7" in str(error) and "lab/" in str(error)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_process_killed_in_the_middle_of_a_step_is_named(tmp_path: Path, stage: int) -> None:
    marker = tmp_path / "pid"
    slow = (
        f"open({str(marker)!r} + os.environ.get('RANK', ''), 'w').write(str(os.getpid())) "
        "if len(x) == 2 else None; time.sleep(0.02)"
    )
    target = Path(f"{marker}{stage}")

    def kill() -> None:
        while not target.exists() or not target.read_text():
            time.sleep(0.01)
        os.kill(int(target.read_text()), signal.SIGKILL)

    where = "in_middle" if stage == 1 else "in_data"
    if stage != 1:
        slow = slow.replace("len(x) == 2", "i > 3")  # the first three are read for the cut
    thread = threading.Thread(target=kill)
    thread.start()
    error = error_of(request_for(tmp_path, steps=2000, elastic=False, **{where: slow}))
    thread.join()
    assert isinstance(error, errors.PeerLostError)
    assert DEVICES[stage] in error.what and "SIGKILL" in error.what


def test_a_stage_short_of_memory_makes_its_pipelines_micro_batches_smaller(tmp_path: Path) -> None:
    bad = "if len(x) == 2: raise torch.OutOfMemoryError('full')"
    outcome = launch(request_for(tmp_path, in_middle=bad))
    assert outcome.parameters_agree
    assert outcome.plan.pipelines[0].micro_batch_sizes == (1,) * 8
    assert [s for s in outcome.decisions if "lab/b ran out of memory with micro-batch 2" in s]


def test_a_stage_that_never_has_enough_memory_ends_the_run(tmp_path: Path) -> None:
    bad = "if len(x) in (1, 2): raise torch.OutOfMemoryError('full')"
    error = error_of(request_for(tmp_path, in_middle=bad))
    assert isinstance(error, errors.OutOfMemoryError) and "lab/b" in error.what


def test_layers_out_of_order_name_the_order(tmp_path: Path) -> None:
    error = error_of(request_for(tmp_path, plan_of("middle", "first", "last")))
    assert isinstance(error, errors.PlanMismatchError)
    assert "cannot be cut" in error.what and "first, middle, last" in error.remedy


def test_a_missing_layer_and_an_unknown_one_are_named(tmp_path: Path) -> None:
    error = error_of(request_for(tmp_path, plan_of("first", "middle")))
    assert isinstance(error, errors.PlanMismatchError) and "no stage holds last" in error.what
    error = error_of(request_for(tmp_path, plan_of("first", "midle", "last")))
    assert isinstance(error, errors.UnknownNameError) and "'middle'" in error.remedy


def test_a_branch_on_data_crosses_no_cut(tmp_path: Path) -> None:
    bad = "return self.last(self.middle.line(x) if self.first(x).sum() > 0 else x)"
    error = error_of(request_for(tmp_path, in_forward=bad))
    assert isinstance(error, errors.ModelError)
    assert "the forward of Net cannot be cut" in error.what


def test_what_is_no_tensor_crosses_no_cut(tmp_path: Path) -> None:
    """The middle layer gives an object of a class of its own, from which the last one takes its input."""
    bad = """
        class Result:
            def __init__(self, value): self.value = value
        return Result(self.line(x))
"""
    code = {"in_middle": bad, "in_forward": "return self.last(self.middle(self.first(x)).value)"}
    error = error_of(request_for(tmp_path, **code))
    assert isinstance(error, errors.ModelError)
    assert "the forward of Net cannot be cut" in error.what
    assert "layer 'middle' gives a Result, which is no tensor" in error.numbers


def written(plan: Plan, **changes: object) -> bytes:
    """The plan's file with fields of its first pipeline or stage changed."""
    raw = msgspec.to_builtins(plan)
    pipeline = raw["pipelines"][0]
    for name, value in changes.items():
        place = pipeline if name in pipeline else pipeline["stages"][0]
        place[name] = value
    return encode(raw)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": []}, "a stage needs at least one layer"),
        ({"layers": ["first", "last"]}, "layers are placed twice: last"),
        ({"micro_batch": 0}, "micro_batch 1 or more"),
        ({"shares": [{"devices": ["lab/a"], "samples": 0}]}, "at least one sample"),
        ({"shares": [{"devices": ["lab/a"], "samples": 3}]}, "take 3 samples of each micro-batch of 2"),
        ({"samples": 6}, "the pipelines take 6 samples, the global batch is 8"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_when_its_file_is_read(changes: dict, words: str) -> None:
    with pytest.raises(errors.FileError) as caught:
        decode(written(THREE, **changes), Plan, "plan.json")
    assert words in caught.value.what and "plan.json" in caught.value.what
