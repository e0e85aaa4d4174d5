"""evener train with state in parts: exact, and its checkpoints go on under any other owners."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file

from evener.core.fleet import Device, Fleet
from evener.core.plan import Held, Ownership, Pipeline, Plan, Share, Stage
from evener.errors import EvenerError
from evener.report.metrics import read_metrics
from evener.session.checkpoints.save_rule import Keep, rule_of
from evener.session.checkpoints.tensors import PARAMETER_FILE
from evener.session.exactness.verify import verify
from evener.session.launching.launch import launch
from evener.session.request import Request

SCRIPT = """
import torch, evener as ev
from torch import nn

def recipe():
    torch.manual_seed(1)
    x, y = torch.randn(60, 6), torch.randn(60, 3)
    layers = [nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 3)]
    return ev.Recipe(model=nn.Sequential(*layers), dataset=list(zip(x, y)), loss=nn.functional.mse_loss,
                     reduction="mean", heldout=list(zip(x, y))[:7], global_batch=12, max_norm=0.5,
                     optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
"""
NAMES = ("here/a", "here/b", "here/c")


def plan(held: Held, parts: tuple[int, ...] = (5, 3, 2)) -> Plan:
    layers, rows = ("0", "1", "2", "3", "4"), ((7, 3), (5, 5), (0, 1))
    return Plan(
        global_batch=12,
        schedule="1f1b",
        pipelines=tuple(
            Pipeline(
                samples=samples,
                micro_batch=size,
                stages=(Stage(layers=layers, shares=(Share(devices=(name,), samples=size),)),),
            )
            for name, (samples, size) in zip(NAMES, rows, strict=True)
        ),
        owners=tuple(
            Ownership(layer=x, parts=dict(zip(NAMES, parts, strict=True)), held=held) for x in ("0", "2", "4")
        ),
    )


def hybrid(held: Held, parts: tuple[int, ...] = (4, 1, 2, 3)) -> Plan:
    """Two pipelines with cuts of their own: layers 0 and 1 are on a and c, 2 on a and d, 4 on b and d."""
    layers, names = ("0", "1", "2", "3", "4"), (*NAMES, "here/d")
    rows = ((7, 2, 3, names[:2]), (5, 5, 2, names[2:]))
    return Plan(
        global_batch=12,
        schedule="1f1b",
        pipelines=tuple(
            Pipeline(
                samples=samples,
                micro_batch=size,
                stages=tuple(
                    Stage(layers=run, shares=(Share(devices=(name,), samples=size),))
                    for name, run in zip(devices, (layers[:cut], layers[cut:]), strict=True)
                ),
            )
            for samples, size, cut, devices in rows
        ),
        owners=tuple(
            Ownership(layer=x, parts={n: p for n, p in zip(names, parts, strict=True) if n in of}, held=held)
            for x, of in (("0", "here/a here/c"), ("2", "here/a here/d"), ("4", "here/b here/d"))
        ),
    )


def asked(folder: Path, script: str = SCRIPT, **more: Any) -> Request:
    (folder / "task.py").write_text(script, encoding="utf-8")
    names = more["plan"].devices if "plan" in more else NAMES
    devices = tuple(Device(name=n, kind="cpu", type="cpu", threads=1) for n in names)
    return Request(
        **{
            "script": str(folder / "task.py"),
            "fleet": Fleet(devices=devices),
            "run_dir": str(folder),
            "quiet": True,
            **more,
        }
    )


@pytest.mark.parametrize("given", [plan("gradients"), plan("parameters"), hybrid("gradients")])
def test_a_plan_with_owners_is_exact(tmp_path: Path, given: Plan) -> None:
    """Under AdamW and a clip norm."""
    found = verify(asked(tmp_path, plan=given, steps=3))
    assert found is not None and found.exact
    assert found.gradient_error_float64 < 1e-12 and found.parameter_error_float64 < 1e-10


ALONE = Fleet(devices=(Device(name="here/x", kind="cpu", type="cpu", threads=1),))


@pytest.mark.parametrize(
    ("first", "others"),
    [
        (plan("parameters"), {"stages": {"plan": hybrid("optimizer")}}),
        (
            hybrid("gradients"),
            {"one stage": {"plan": plan("optimizer", (1, 0, 4))}, "none": {"fleet": ALONE}},
        ),
    ],
)
def test_a_run_goes_on_with_other_owners_and_with_none(
    tmp_path: Path, first: Plan, others: dict[str, dict[str, Any]]
) -> None:
    rule = rule_of("3", Keep(last=3, every=0))
    whole = launch(asked(tmp_path, plan=first, steps=6, checkpoint=rule))
    saved = tmp_path / "checkpoints" / "samples-000000000036"
    assert saved.is_dir() and "may join" in " ".join(whole.decisions)
    want = load_file(tmp_path / PARAMETER_FILE)
    for name, more in others.items():
        folder = tmp_path / name
        folder.mkdir()
        launch(asked(folder, steps=6, resume=str(saved), profile_s=1.0, **more))
        end = load_file(folder / PARAMETER_FILE)
        assert [r.step for r in read_metrics(folder / "metrics.jsonl").records] == [3, 4, 5]
        assert end.keys() == want.keys()
        assert all((end[n] - want[n]).abs().max() < 1e-6 for n in want)


def test_owners_of_a_layer_that_is_not_there_are_refused_before_devices_agree(tmp_path: Path) -> None:
    wrong = plan("optimizer")
    owners = (Ownership(layer="9", parts={"here/a": 1}), *wrong.owners)
    with pytest.raises(EvenerError, match="9, no layers of the model") as e:
        launch(asked(tmp_path, plan=replace(wrong, owners=owners), steps=2))
    assert e.value.code == "EV202" and not (tmp_path / "fleet.json").exists()


DIES = """
    def die(*_):
        import os, signal, torch.distributed as dist
        if dist.is_initialized() and dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    layers[4].register_full_backward_hook(die)
    return ev.Recipe"""


def test_a_lost_owner_of_a_stage_ends_the_run_with_its_name(tmp_path: Path) -> None:
    """As where there is one stage: nobody else has its part. It is killed in a backward."""
    script = SCRIPT.replace("\n    return ev.Recipe", DIES)
    with pytest.raises(EvenerError, match="the process of here/d was ended by SIGKILL") as e:
        launch(asked(tmp_path, script, plan=hybrid("gradients"), steps=5))
    assert e.value.code == "EV401" and "--resume" in e.value.remedy
