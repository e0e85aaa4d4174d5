"""`evener train` by itself: a model that fits no device is measured by layer, cut, trained and reported."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from evener.core.figures import Figure, line
from evener.core.fleet import Device, Fleet, Link
from evener.errors import NoPlanFitsError
from evener.session.launching.launch import launch
from evener.session.request import Request

SCRIPT = """
import torch, evener as ev
from torch import nn

def recipe():
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    data = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    return ev.Recipe(
        model=nn.Sequential(*layers), dataset=list(zip(data, torch.zeros(16, 64))), loss=nn.MSELoss(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), global_batch=8,
    )
"""
WHOLE = 6 * (64 * 64 + 64) * 4
"""Bytes of the parameters; gradients and the two moments of Adam make it four times that."""


def fleet(*memory: float) -> Fleet:
    """Devices of 20, 10, ... MFLOP/s."""
    made = tuple(
        Device(
            name=f"lab/{i}",
            kind=f"kind {i}",
            threads=1,
            memory_bytes=Figure(value=held, source="assumed"),
            flops={"float32": Figure(value=2e7 / 2**i, source="assumed")},
        )
        for i, held in enumerate(memory)
    )
    return Fleet(devices=made, links=(Link(a="lab", b="lab", curve=line(1e-4, 1e9)),))


def request_for(folder: Path, devices: Fleet, **wishes) -> Request:
    script = folder / "job.py"
    script.write_text(SCRIPT, encoding="utf-8")
    return Request(
        fleet=devices,
        run_dir=str(folder / "run"),
        script=str(script),
        rehearse=True,
        steps=5,
        profile_s=3.0,
        quiet=True,
        **wishes,
    )


def test_a_model_that_no_device_holds_becomes_a_pipeline_with_a_full_report(tmp_path) -> None:
    outcome = launch(request_for(tmp_path, fleet(3.9 * WHOLE, 3.5 * WHOLE)))
    (pipeline,) = outcome.plan.pipelines
    assert len(pipeline.stages) == 2
    assert set(pipeline.devices) == {"lab/0", "lab/1"}
    layers = {d: len(s.layers) for s in pipeline.stages for d in s.shares[0].devices}
    assert layers["lab/0"] > layers["lab/1"]
    report = outcome.report
    assert report is not None
    assert 0 < report.efficiency < 1.05
    worth = {d.name: d.samples_per_step for d in report.devices}
    assert sum(worth.values()) == pytest.approx(8)
    assert worth["lab/0"] > worth["lab/1"] > 0
    assert any("cannot hold the model" in note for note in report.notes)
    assert sum(report.lost_s.values()) == pytest.approx(report.gap_s)
    assert report.loss_last < report.loss_first
    assert outcome.parameters_agree


def test_state_in_parts_has_room_for_a_second_pipeline(tmp_path) -> None:
    """Half of the model, its gradients and all of its state fill a device but for activations and sums."""
    devices = tuple(
        replace(device, name=f"{host}/{i}", kind="k", flops={"float32": Figure(value=2e7, source="assumed")})
        for host in "ab"
        for i, device in enumerate(fleet(2.3 * WHOLE, 2.3 * WHOLE).devices)
    )
    near, far = line(1e-4, 1e9), line(1e-3, 1e7)
    links = (*(Link(a=h, b=h, curve=near) for h in "ab"), Link(a="a", b="b", curve=far))
    wanted = request_for(tmp_path, Fleet(devices=devices, links=links), shapes="all", state="auto")
    outcome = launch(wanted)
    assert [len(p.stages) for p in outcome.plan.pipelines] == [2, 2]
    assert outcome.plan.owners and outcome.plan.prediction is not None
    assert all(b <= 0.9 * 2.3 * WHOLE for b in outcome.plan.prediction.memory_bytes.values())
    assert outcome.parameters_agree and outcome.report is not None
    assert outcome.report.loss_last < outcome.report.loss_first


@pytest.mark.parametrize(
    ("memory", "shapes", "words"),
    [
        ((3.9, 3.5), "data-parallel", "a pipeline over several devices"),
        ((1.5, 1.5), "auto", "KiB more memory"),
    ],
)
def test_what_fits_nowhere_is_told_before_the_first_step(tmp_path, memory, shapes, words) -> None:
    with pytest.raises(NoPlanFitsError, match=words):
        launch(request_for(tmp_path, fleet(*(x * WHOLE for x in memory)), shapes=shapes))
