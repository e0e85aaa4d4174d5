"""The checks that need a real accelerator, as one short script: `pytest tests/gpu`. Skipped without one."""

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from evener.core.fleet import Fleet
from evener.core.job import State
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.split import apportion
from evener.probing import devices_here, host_name
from evener.session.ask import fleet_here
from evener.session.checkpoints.save_rule import Keep, rule_of
from evener.session.exactness.verify import verify
from evener.session.launching.launch import launch
from evener.session.request import Request
from tests.local.device.checks import CHECKS

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here")

SCRIPT = """
import torch, evener as ev
from torch import nn

def recipe():
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(96, 20, generator=g), torch.randint(0, 3, (96,), generator=g)
    return ev.Recipe(model=nn.Sequential(nn.Linear(20, 40), {middle}, nn.Linear(40, 3)),
                     dataset=list(zip(x, y)), loss=nn.CrossEntropyLoss(), global_batch=24, max_norm=1.0,
                     optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2){more})
"""


def request_for(folder: Path, fleet: Fleet, middle: str = "nn.Tanh()", more: str = "") -> Request:
    script = folder / "job.py"
    script.write_text(SCRIPT.format(middle=middle, more=more), encoding="utf-8")
    return Request(fleet=fleet, script=str(script), run_dir=str(folder), steps=4, quiet=True)


@pytest.mark.parametrize("name", CHECKS)
def test_what_programs_do_with_a_device(name: str) -> None:
    """The same checks run on the rehearsal device, in tests/local/device."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    CHECKS[name](accelerator.type)


def test_every_accelerator_has_an_identity_and_a_kind() -> None:
    for device in devices_here(host_name()):
        assert device.kind and device.hardware_id


def test_all_accelerators_train_one_model(tmp_path: Path) -> None:
    outcome = launch(request_for(tmp_path, fleet_here(None)))
    assert outcome.parameters_agree


def test_an_accelerator_and_the_cpu_train_one_model_exactly(tmp_path: Path) -> None:
    fleet = mixed()
    request = request_for(tmp_path, fleet)
    split = {d.name: n for d, n in zip(fleet.devices, (19, 5), strict=True)}
    found = verify(msgspec.structs.replace(request, batch_per_device=split))
    assert found is not None
    assert found.gradient_error_float64 < 1e-12 and found.parameter_error_float64 < 1e-10
    assert found.gradient_error < 1e-5  # the two devices round matrix products differently


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="one accelerator here")
def test_accelerators_sum_by_their_own_library_exactly(tmp_path: Path) -> None:
    fleet = fleet_here(None)
    weights = [float(1 + i % 2) for i in range(len(fleet.devices))]
    split = {d.name: n for d, n in zip(fleet.devices, apportion(24, weights), strict=True)}
    found = verify(msgspec.structs.replace(request_for(tmp_path, fleet), batch_per_device=split))
    assert found is not None
    assert found.gradient_error_float64 < 1e-12 and found.parameter_error_float64 < 1e-10


def mixed() -> Fleet:
    """The first accelerator and the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return fleet_here(f"{accelerator.type}:0,cpu")


def test_waves_of_batchnorm_over_an_accelerator_and_the_cpu(tmp_path: Path) -> None:
    fleet = mixed()
    split = {d.name: n for d, n in zip(fleet.devices, (19, 5), strict=True)}
    request = request_for(tmp_path, fleet, "nn.BatchNorm1d(40), nn.Tanh()", ', batch_norm="wave"')
    found = verify(msgspec.structs.replace(request, batch_per_device=split))
    assert found is not None
    assert found.gradient_error_float64 < 1e-12 and found.parameter_error_float64 < 1e-10


@pytest.mark.parametrize("first", [0, 1])
def test_a_pipeline_over_an_accelerator_and_the_cpu_with_the_loss_on_the_host(
    first: int, tmp_path: Path
) -> None:
    fleet = mixed()
    order = [fleet.devices[first], fleet.devices[1 - first]]
    stages = tuple(
        Stage(layers=layers, shares=(Share(devices=(d.name,), samples=8),))
        for d, layers in zip(order, (("0", "1"), ("2",)), strict=True)
    )
    pipelines = (Pipeline(samples=24, micro_batch=8, stages=stages),)
    plan = Plan(global_batch=24, pipelines=pipelines, schedule="1f1b")
    request = request_for(tmp_path, fleet, more=', place={"(loss)": "cpu"}')
    found = verify(msgspec.structs.replace(request, plan=plan))
    assert found is not None
    assert found.gradient_error_float64 < 1e-12 and found.parameter_error_float64 < 1e-10


def test_a_run_goes_on_from_a_checkpoint_copied_beside_the_steps(tmp_path: Path) -> None:
    one, two, whole = (tmp_path / name for name in ("one", "two", "whole"))
    for folder in (one, two, whole):
        folder.mkdir()
    rule = rule_of("2", Keep(last=2, every=0))
    first = launch(msgspec.structs.replace(request_for(one, mixed()), checkpoint=rule))
    launch(msgspec.structs.replace(request_for(two, mixed()), steps=6, plan=first.plan, resume=str(one)))
    launch(msgspec.structs.replace(request_for(whole, mixed()), steps=6, plan=first.plan))
    ours, wanted = (load_file(folder / "model.safetensors") for folder in (two, whole))
    for name, tensor in wanted.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("held", ["optimizer", "gradients", "parameters"])
def test_state_in_unequal_parts_over_an_accelerator_and_the_cpu(held: State, tmp_path: Path) -> None:
    fleet = mixed()
    parts = {d.name: n for d, n in zip(fleet.devices, (1, 3), strict=True)}
    found = verify(msgspec.structs.replace(request_for(tmp_path, fleet), state=held, parts=parts))
    assert found is not None
    assert found.gradient_error_float64 < 1e-12 and found.parameter_error_float64 < 1e-10


@pytest.mark.parametrize("residence", ["host", "host-optimizer"])
def test_a_stage_whose_parameters_live_on_the_host(residence: str, tmp_path: Path) -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    fleet = fleet_here(f"{accelerator.type}:0")
    share = Share(devices=(fleet.devices[0].name,), samples=8)
    stage = Stage(layers=("0", "1", "2"), shares=(share,), residence=residence)
    plan = Plan(global_batch=24, pipelines=(Pipeline(samples=24, micro_batch=8, stages=(stage,)),))
    found = verify(msgspec.structs.replace(request_for(tmp_path, fleet), plan=plan))
    assert found is not None
    assert found.gradient_error_float64 < 1e-12 and found.parameter_error_float64 < 1e-10


TABLE = """
import torch, evener as ev
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.EmbeddingBag(50, 4, mode="sum"), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.emb(x)))

def recipe():
    g = torch.Generator().manual_seed(1)
    x, y = torch.randint(0, 50, (96, 3), generator=g), torch.randint(0, 3, (96,), generator=g)
    return ev.Recipe(model=Model(), dataset=list(zip(x, y)), loss=nn.CrossEntropyLoss(), global_batch=24,
                     optimizer=lambda p: torch.optim.Adam(p, lr=1e-2), place={"emb": "cpu"})
"""


def test_rows_of_a_table_in_host_memory_are_sent_ahead_and_the_run_is_exact(tmp_path: Path) -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    request = request_for(tmp_path, fleet_here(f"{accelerator.type}:0"))
    Path(request.script).write_text(TABLE, encoding="utf-8")
    found = verify(request)
    assert found is not None
    assert found.parameter_error_float64 < 1e-10
