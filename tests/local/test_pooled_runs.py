"""BatchNorm over waves and dropout free of the split, the public way: verify, no memory, what is said."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from evener.core.files import read
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.errors import ScheduleError, UsageError
from evener.session.launching.launch import launch
from evener.session.request import Request
from tests.local.plans import plan_of, stage
from tests.local.runs import run_of, verified

A, B, C = "lab/a", "lab/b", "lab/c"
SCRIPT = """
import os, torch, evener as ev
from torch import nn

class Full(nn.Module):
    '''Has no memory for {full} samples on the second device.'''
    def forward(self, x):
        if os.environ.get("RANK") == "1" and len(x) == {full}:
            raise torch.OutOfMemoryError("full")
        return x

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.full, self.drop, self.after = Full(), nn.Dropout(0.3), nn.BatchNorm2d(3)
    def forward(self, x):
        return self.after(x + self.drop(self.full(torch.tanh(self.norm(self.conv(x))))))

def recipe():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(11, 3, 4, 4, generator=generator)
    y = torch.randint(0, 3, (11,), generator=generator)
    return ev.Recipe(
        model=nn.Sequential(nn.Conv2d(3, 3, 1), Block(), Block(), nn.Flatten(), nn.Linear(48, 3)),
        dataset=list(zip(x, y)), heldout=list(zip(x, y)), global_batch=8, loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {options}
    )
"""
BOTH = 'batch_norm="wave", dropout="split-free"'


SIDE_BY_SIDE = plan_of((6, (stage("0 1 2 3 4", (A, 2)),)), (2, (stage("0 1 2 3 4", (B, 2)),)))
CUT = (stage("0 1", (A, 2)), stage("2 3 4", (B, 2)))
HYBRID = plan_of((5, CUT), (3, (stage("0 1 2 3 4", (C, 2)),)))


def request_for(folder: Path, plan: Plan, options: str = BOTH, *, full: int = 0, steps: int = 3) -> Request:
    text = SCRIPT.replace("{full}", str(full)).replace("{options}", options)
    return run_of(folder, text, plan, steps=steps)


@pytest.mark.parametrize("plan", [SIDE_BY_SIDE, HYBRID], ids=["side by side", "hybrid"])
def test_verify_runs_merged_waves_with_dropout_on(tmp_path: Path, plan: Plan) -> None:
    result = verified(request_for(tmp_path, plan))
    assert len(result.notes) == 1 and "normalised together" in result.notes[0]
    assert result.plan.inexact == result.notes


def test_the_defaults_are_named_in_the_plan(tmp_path: Path) -> None:
    said = " ".join(verified(request_for(tmp_path, SIDE_BY_SIDE, options="")).notes)
    assert "each micro-batch is normalised by its own statistics" in said
    assert "every device draws its own masks" in said


@pytest.mark.parametrize("plan", [SIDE_BY_SIDE, HYBRID], ids=["side by side", "hybrid"])
def test_no_memory_in_the_middle_of_a_wave_leaves_no_trace(tmp_path: Path, plan: Plan) -> None:
    """The second device is full between two layers that meet; all redo the step in smaller micro-batches."""
    result = verified(request_for(tmp_path, plan, full=2))
    assert [p.micro_batch for p in result.plan.pipelines] == ([2, 1] if plan is SIDE_BY_SIDE else [1, 2])


def test_pipelines_that_would_wait_for_each_other_are_refused(tmp_path: Path) -> None:
    plan = plan_of((5, CUT), (3, (stage("0 1 2 3 4", (C, 2)),)), schedule="1f1b")
    with pytest.raises(ScheduleError, match="1f1b cannot pool BatchNorm over waves"):
        launch(request_for(tmp_path, plan))
    assert launch(request_for(tmp_path, plan, options="")) is not None


def test_an_unequal_schedule_is_made_from_the_profile_for_all(tmp_path: Path) -> None:
    plan = plan_of((8, CUT), schedule="unequal")
    request = request_for(tmp_path, plan, options="")
    with pytest.raises(UsageError, match="made from measured seconds"):
        launch(request)
    (tmp_path / "measured").mkdir()
    measured = replace(request, plan=None, run_dir=str(tmp_path / "measured"), steps=1, profile_s=4.0)
    launch(measured)
    profile = read(tmp_path / "measured" / "profile.json", Profile)
    result = verified(replace(request, profile=profile))
    assert result.plan.schedule == "unequal"
