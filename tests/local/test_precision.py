"""Precision by device: float32 sums around lower precision, held against one device and named in the plan."""

import re
from pathlib import Path

import pytest
import torch

from evener.cli.verify import verdict_of
from evener.core.order import epoch_order
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.report.metrics import read_metrics
from evener.session.checkpoints.tensors import first_gradients
from evener.session.exactness.verify import verify
from evener.session.launching.launch import launch
from evener.session.request import Request
from tests.local.runs import run_of

A, B = "lab/a", "lab/b"
SCRIPT = """
import torch, evener as ev
from torch import nn
from torch.nn.functional import cross_entropy

def samples():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 16, generator=generator)
    return list(zip(x, (x[:, :3] * 3).argmax(1)))

def model():
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))

def recipe():
    return ev.Recipe(
        model=model(), dataset=samples(), global_batch=8,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1 / FACTOR),
        loss=lambda o, t: FACTOR * cross_entropy(o, t),
    )
"""


def stage(layers: str, device: str, samples: int, precision: str | None) -> Stage:
    share = Share(devices=(device,), samples=samples)
    return Stage(layers=tuple(layers.split()), shares=(share,), precision=precision)


def pipeline(first: str | None, second: str | None) -> Plan:
    """Two stages on two devices, with a last micro-batch that is smaller."""
    stages = stage("0 1", A, 3, first), stage("2 3 4", B, 3, second)
    made = Pipeline(samples=8, micro_batch=3, stages=stages)
    return Plan(global_batch=8, pipelines=(made,), schedule="1f1b")


def side_by_side(first: str | None, second: str | None) -> Plan:
    """The whole model on each of two devices."""
    pipelines = (
        Pipeline(samples=5, micro_batch=5, stages=(stage("0 1 2 3 4", A, 5, first),)),
        Pipeline(samples=3, micro_batch=3, stages=(stage("0 1 2 3 4", B, 3, second),)),
    )
    return Plan(global_batch=8, pipelines=pipelines)


def request_for(folder: Path, plan: Plan, steps: int, factor: float = 1.0) -> Request:
    return run_of(folder, SCRIPT.replace("FACTOR", str(factor)), plan, steps=steps)


@pytest.mark.parametrize(
    "plan",
    [pipeline("bfloat16", None), pipeline(None, "bfloat16"), side_by_side(None, "bfloat16")],
    ids=["first stage", "last stage", "beside float32"],
)
def test_bfloat16_on_one_device_is_off_by_what_follows_from_it_and_says_so(
    tmp_path: Path, plan: Plan
) -> None:
    found = verify(request_for(tmp_path, plan, steps=2))
    assert found is not None and found.as_planned and not found.exact
    assert 1e-4 < found.gradient_error <= found.gradient_bound < 5e-2
    assert found.gradient_error_float64 <= 1e-12
    (devices,) = found.lower_precision.values()
    named = f"bfloat16 on {devices[0]}"
    assert any(text.startswith(named) for text in found.plan.inexact)
    assert re.fullmatch(
        rf"no, as the plan says: {named}; gradient error \de-0\d, within the \de-0\d that follows",
        verdict_of(found),
    )
    assert all(
        g.dtype == torch.float32 for own in first_gradients(tmp_path / "float32") for g in own.values()
    )


def test_one_loss_scale_for_all_stages_in_float16(tmp_path: Path) -> None:
    """With a loss 40 times larger the first scale overflows in the last stage: all skip, all halve."""
    outcome = launch(request_for(tmp_path, pipeline(None, "float16"), steps=24, factor=40.0))
    assert outcome.parameters_agree
    assert any("one loss scale for all devices" in text for text in outcome.plan.inexact)
    records = read_metrics(tmp_path / "metrics.jsonl").records
    skipped = [r.step for r in records if r.skipped]
    assert skipped[0] == 0 and len(skipped) <= 8
    assert all("overflowed float16" in records[i].skipped for i in skipped)
    losses = [r.loss for r in records if r.loss is not None]
    assert len(losses) == 24 - len(skipped) and losses[-1] < 0.8 * losses[0]


def test_small_gradients_survive_float16(tmp_path: Path) -> None:
    """With a loss of a millionth, unscaled float16 gradients would be mostly zero."""
    request = request_for(tmp_path, pipeline("float16", "float16"), steps=1, factor=1e-6)
    launch(Request(**{f: getattr(request, f) for f in request.__struct_fields__} | {"keep_gradient": True}))
    got = {n: g for own in first_gradients(tmp_path) for n, g in own.items()}
    scope: dict = {}
    exec(SCRIPT.replace("FACTOR", "1e-6"), scope)
    torch.manual_seed(0)
    recipe = scope["recipe"]()
    chosen = epoch_order(64, 0, 0, shuffle=True)[:8]
    x, y = (torch.stack(column) for column in zip(*[recipe.dataset[int(i)] for i in chosen], strict=True))
    recipe.loss(recipe.model(x), y).backward()
    want = {n: p.grad for n, p in recipe.model.named_parameters()}
    off = sum(float((got[n] - want[n]).square().sum()) for n in want) ** 0.5
    assert off <= 5e-3 * sum(float(g.square().sum()) for g in want.values()) ** 0.5


def test_a_precision_that_does_not_exist_is_no_plan() -> None:
    with pytest.raises(ValueError, match="float32, bfloat16, float16"):
        stage("0", A, 1, "bf16")
