"""Tables beside accelerators that are rehearsed: the tutorials' case, and memory as it was predicted."""

from pathlib import Path
from typing import Any

import pytest

from evener.core.catalogue import FleetFile, FleetLine, Scale, resolved
from evener.core.figures import Figure
from evener.core.fleet import Device, Fleet, Rehearsed
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.errors import NoPlanFitsError
from evener.session.exactness.verify import verify
from evener.session.launching.launch import launch
from evener.session.recipe import load_recipe
from evener.session.request import Request
from tests.architecture.source import ROOT

EXAMPLE = ROOT / "examples" / "word_table.py"
MIB = 2.0**20
SCRIPT = """
import torch, evener as ev
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding({rows}, 64, device="meta"), nn.Linear(64, 3)

    def forward(self, ids):
        return self.head(self.emb(ids).mean(1))

def recipe():
    ids = torch.randint(0, {rows}, (512, 4), generator=torch.Generator().manual_seed(1))
    return ev.Recipe(model=Model(), dataset=list(zip(ids, ids[:, 0] % 3)), loss=nn.CrossEntropyLoss(),
                     global_batch=32, optimizer=lambda p: torch.optim.{optimizer}, {options})
"""


def figure(value: float) -> Figure:
    return Figure(value=value, source="assumed")


def cards(*mib: float, host_mib: float | None = None) -> Fleet:
    """Accelerators with so much memory, all of it for tensors, and their host."""
    devices = tuple(
        Device(
            name=f"lab/gpu{i}",
            kind=f"card of {m} MiB",
            type="cuda",
            memory_bytes=figure(m * MIB),
            flops={"float32": figure(1e12), "float64": figure(1e12)},
            bytes_per_s=figure(1e12),
            rehearsed=Rehearsed(smaller=20),
        )
        for i, m in enumerate(mib)
    )
    host = Device(name="lab/cpu", kind="host", memory_bytes=figure((host_mib or 0) * MIB or 1))
    line = FleetLine(a="lab", b="lab", kind="PCIe 4.0 x16")
    fleet = resolved(FleetFile(devices=devices, links=(line,)), "here").as_rehearsed()
    return fleet.with_hosts((host,)) if host_mib else fleet


def request(folder: Path, fleet: Fleet, *, script: Path | None = None, **more: Any) -> Request:
    wishes = {"steps": 3, "evaluate": False, "quiet": True, "profile_s": 2.0} | more
    job = str(script or folder / "job.py")
    return Request(script=job, fleet=fleet, rehearse=True, run_dir=str(folder), **wishes)


def write(folder: Path, rows: int, optimizer: str = "SGD(p, lr=0.1)", options: str = "") -> None:
    text = SCRIPT.format(rows=rows, optimizer=optimizer, options=options)
    (folder / "job.py").write_text(text, encoding="utf-8")


def one_card() -> Fleet:
    card = Device(name="lab/gpu0", kind="NVIDIA GeForce RTX 3060")
    line = FleetLine(a="lab", b="lab", kind="PCIe 4.0 x16")
    file = FleetFile(devices=(card,), links=(line,), scaled=Scale(slower=10, smaller=100))
    return resolved(file, "here").as_rehearsed()


def test_the_tutorials_case_is_exact_with_its_table_on_the_host(tmp_path: Path) -> None:
    """A table of 100,000 × 128 words on the CPU, LSTM and classifier on the accelerator, one line more."""
    recipe = load_recipe(EXAMPLE, 0)
    assert recipe.place == {"embedding": "cpu"} and recipe.model.embedding.weight.shape == (100_000, 128)
    share = Share(devices=("lab/gpu0",), samples=32)
    stage = Stage(layers=("embedding", "lstm", "classifier"), shares=(share,))
    plan = Plan(global_batch=64, pipelines=(Pipeline(samples=64, micro_batch=32, stages=(stage,)),))
    found = verify(request(tmp_path, one_card(), script=EXAMPLE, steps=1, plan=plan))
    assert found is not None and found.exact
    (table,) = found.plan.tables
    assert (table.residence, table.rows) == ("cpu", {"lab/gpu0": 100_000})


def test_memory_of_a_device_is_what_was_predicted_however_many_steps_it_takes(tmp_path: Path) -> None:
    """Rows that were sent ahead stayed on the device for good: with each step half a MiB was lost."""
    outcome = launch(request(tmp_path, one_card(), script=EXAMPLE, steps=6, micro_batch=64))
    predicted = outcome.plan.prediction.memory_bytes["lab/gpu0"]
    assert outcome.peak_bytes["lab/gpu0"].value == pytest.approx(predicted, rel=0.05)


def test_a_table_of_twice_the_largest_memory_trains_in_the_memory_that_was_predicted(tmp_path: Path) -> None:
    """Unasked: it is not made in one piece anywhere. The host has no room, so the cards hold it by budget."""
    fleet = cards(24, 20, 20, 16, host_mib=8)
    rows = int(48 * MIB) // 256
    write(tmp_path, rows)
    outcome = launch(request(tmp_path, fleet))
    (table,) = outcome.plan.tables
    assert table.residence == "device" and sum(table.rows.values()) == rows
    assert "MiB, which does not fit" in table.why and "all devices take part" in table.why
    predicted = outcome.plan.prediction.memory_bytes
    assert len(predicted) == 4 and max(predicted.values()) > 10 * MIB
    for name, peak in outcome.peak_bytes.items():
        assert peak.value == pytest.approx(predicted[name], rel=0.05), name


def test_a_table_larger_than_all_memory_is_refused_before_the_first_step(tmp_path: Path) -> None:
    write(tmp_path, int(200 * MIB) // 256)
    with pytest.raises(NoPlanFitsError, match="the table emb is larger than all memory") as caught:
        launch(request(tmp_path, cards(24, 20, host_mib=8)))
    assert caught.value.numbers == (
        "200 MiB with its optimiser's state; lab/gpu0 18 MiB, lab/gpu1 15 MiB: 33 MiB in all"
    )
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("place", ["auto", "dense"])
def test_the_planners_choice_is_exact(tmp_path: Path, place: str) -> None:
    text = SCRIPT.replace(', device="meta"', "")
    script = text.format(rows=5000, optimizer="Adam(p, lr=0.01)", options="max_norm=0.1")
    (tmp_path / "job.py").write_text(script, encoding="utf-8")
    fleet = cards(200, 100, host_mib=400)
    found = verify(
        request(tmp_path, fleet, batch_per_device={"lab/gpu0": 20, "lab/gpu1": 12}, place={"*": place})
    )
    assert found is not None and found.exact, found
    tables = {t.table: t.residence for t in found.plan.tables}
    assert tables == ({"emb": "device"} if place == "auto" else {})
