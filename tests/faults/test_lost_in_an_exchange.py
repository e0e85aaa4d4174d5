"""Sums over groups in whole runs: a member is lost, and a compressed gradient is not finite."""

import signal
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from evener.core.plan import Plan, Reduction
from evener.report.metrics import read_metrics
from evener.session.launching.launch import launch
from tests.faults.jobs import error_of, request_for, signalled, split, steps_of

pytestmark = pytest.mark.timeout(120)


def grouped(plan: Plan, compression: str | None = None) -> Plan:
    """lab/a and lab/b are one group, lab/c another, and lab/a speaks for the first."""
    inside = Reduction(devices=("lab/a", "lab/b"), transport="gloo")
    lane = Reduction(devices=("lab/a", "lab/c"), transport="gloo", part=1.0, compression=compression)
    return replace(plan, reductions=(inside, lane))


@pytest.mark.parametrize(
    ("lost", "lane"), [("lab/a", ("lab/b", "lab/c")), ("lab/b", ("lab/a", "lab/c")), ("lab/c", None)]
)
def test_the_others_regroup_and_nothing_is_lost(tmp_path, lost: str, lane: tuple[str, ...] | None) -> None:
    request = request_for(tmp_path, grouped(split(5, 4, 3)), steps=8)
    outcome = signalled(request, lost, signal.SIGKILL, after=3)
    assert error_of(outcome, 8) <= 1e-12 and steps_of(outcome) == list(range(8))
    assert lost not in outcome.plan.devices and outcome.parameters_agree
    lanes = [r.devices for r in outcome.plan.reductions if r.part is not None]
    assert lanes == ([lane] if lane else [])


TRAP = """
import torch, evener as ev
from torch import nn

torch.manual_seed(0)

class Data:
    def __init__(self):
        self.x = torch.randn(48, 5, generator=torch.Generator().manual_seed(1))
        self.x[0, 0] = 100.0
        self.y = torch.randint(0, 3, (48,), generator=torch.Generator().manual_seed(2))
    def __len__(self): return 48
    def __getitem__(self, i): return self.x[i], self.y[i]

class Trap(nn.Module):
    '''Sample 0 has a finite loss and a gradient that is NaN: a root at zero.'''
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 300), nn.Linear(300, 3)
    def forward(self, x):
        h = torch.tanh(self.first(x))
        if (x[:, 0] > 50).any():
            h = h + torch.sqrt((h - h.detach()).square().sum())
        return self.last(h)

def recipe():
    return ev.Recipe(model=Trap(), dataset=Data(), loss=nn.CrossEntropyLoss(), global_batch=12,
                     on_non_finite="skip", optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
"""


@pytest.mark.parametrize("compression", ["int8", "top1%", "powersgd4"])
def test_a_step_whose_compressed_gradient_is_not_finite_counts_for_nobody(tmp_path, compression: str) -> None:
    layers = ("first", "last")
    plan = grouped(split(5, 4, 3), compression)
    stages = [replace(p, stages=tuple(replace(s, layers=layers) for s in p.stages)) for p in plan.pipelines]
    request = request_for(tmp_path, replace(plan, pipelines=tuple(stages)), steps=8)
    Path(request.script).write_text(TRAP)
    outcome = launch(request)
    records = read_metrics(Path(outcome.run_dir) / "metrics.jsonl").records
    skipped = [r for r in records if r.skipped]
    assert len(skipped) == 2 and all("NaN or infinite" in r.skipped for r in skipped)  # once in each epoch
    assert outcome.parameters_agree
    found = load_file(Path(outcome.run_dir) / "model.safetensors")
    assert all(t.isfinite().all() for t in found.values())
    assert records[-1].loss < records[0].loss and torch.isfinite(torch.tensor(records[-1].loss))
