"""Disturbed rehearsals: shares move, steps are taken again, and the parameters stay those of one device."""

import json
from pathlib import Path
from statistics import median

import pytest
from safetensors.torch import load_file

from evener.core.faults import parse_faults
from evener.core.figures import Figure
from evener.core.fleet import Device, Fleet
from evener.session.checkpoints.tensors import PARAMETER_FILE
from evener.session.journal import Outcome
from evener.session.launching.launch import launch
from evener.session.request import Request

SCRIPT = """
import torch, evener as ev
from torch import nn

def recipe():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(500, 256, generator=generator)
    y = torch.randint(0, 3, (500,), generator=generator)
    return ev.Recipe(
        model=nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 3)),
        dataset=list(zip(x, y)), global_batch=96, loss=nn.CrossEntropyLoss(), steal={steal},
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )
"""
STEPS = 24


def figure(value: float) -> Figure:
    return Figure(value=value, source="assumed")


def fleet(*rates: float) -> Fleet:
    """Paced devices lab/0, lab/1 … of so many GFLOP/s."""
    return Fleet(
        devices=tuple(
            Device(name=f"lab/{i}", kind=f"paced {rate:g}", flops={"float64": figure(rate * 1e9)}, threads=1)
            for i, rate in enumerate(rates)
        )
    )


def run(
    folder: Path, devices: Fleet, *, steal: bool = False, faults: str = "", elastic: bool = False
) -> Outcome:
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT.format(steal=steal))
    return launch(
        Request(
            script=str(folder / "script.py"),
            fleet=devices,
            rehearse=True,
            run_dir=str(folder),
            steps=STEPS,
            dtype="float64",
            profile_s=2.0,
            evaluate=False,
            quiet=True,
            elastic=elastic,
            faults=parse_faults(faults),
        )
    )


def distance(one: Path, other: Path) -> float:
    """‖a - b‖ / ‖b‖ over all parameters of two runs."""
    a, b = (load_file(folder / PARAMETER_FILE) for folder in (one, other))
    square = sum(float((a[name] - b[name]).square().sum()) for name in b)
    return (square / sum(float(t.square().sum()) for t in b.values())) ** 0.5


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(folder, fleet(0.4))
    return folder


@pytest.mark.parametrize("steal", [False, True], ids=["fixed", "stealing"])
def test_a_slow_device_and_one_out_of_memory_change_the_plan_and_not_the_result(
    tmp_path: Path, undisturbed: Path, steal: bool
) -> None:
    script = "slow lab/0 x3 at step 8; oom lab/1 at step 14; slow lab/2 x2 at 400"
    outcome = run(tmp_path / "run", fleet(0.4, 0.2, 0.1), steal=steal, faults=script)
    assert distance(tmp_path / "run", undisturbed) <= 1e-10
    assert outcome.parameters_agree and outcome.plan.steal == steal
    moved = [s for s in outcome.decisions if "samples move" in s]
    assert moved and moved[0].startswith("after step 9: seconds over the profile's: lab/0 3")
    assert any("step 14: lab/1 ran out of memory" in s for s in outcome.decisions)
    assert "slow lab/2 x2 at 400: not reached" in outcome.decisions
    before = outcome.plan.samples_by_device()
    assert before["lab/0"] < before["lab/1"] * 1.1, "0.4 / 3 is less than 0.2"
    if steal:
        assert any(s.startswith("stealing: samples run beyond those given") for s in outcome.decisions)


def test_a_device_that_hardly_moves_is_left_out_by_a_generation_of_its_own(
    tmp_path: Path, undisturbed: Path
) -> None:
    """Even one sample a step costs more than going on without the device: a move of layers, repaid."""
    outcome = run(tmp_path / "run", fleet(0.4, 0.2, 0.1), faults="slow lab/2 x40 at step 4", elastic=True)
    assert distance(tmp_path / "run", undisturbed) <= 1e-10
    told = "\n".join(outcome.decisions)
    assert "samples move" in told and "layers move" in told and "generation 2" in told
    assert outcome.plan.devices == ("lab/0", "lab/1")
    assert outcome.plan.prediction.factors["lab/2"] == pytest.approx(40, rel=0.1)


def test_the_report_is_of_the_steps_under_the_last_plan(tmp_path: Path) -> None:
    outcome = run(tmp_path / "run", fleet(0.4, 0.2, 0.1), faults="slow lab/0 x3 at step 6")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    step_s = [json.loads(line)["step_s"] for line in lines]
    assert outcome.report.step_s == pytest.approx(median(step_s[11:]), rel=0.1), "steps 8 to 10 are warm-up"
    assert outcome.report.step_s > 1.3 * median(step_s[2:5])
    assert outcome.report.loss_first == json.loads(lines[0])["loss"]
    assert "not in the figures: 8 steps before step 8, when the plan changed" in outcome.report.notes
