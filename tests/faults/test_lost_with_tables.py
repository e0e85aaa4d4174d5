"""Placed tables when devices go and come: rows are handed over, and who has none may be lost."""

import signal
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import nn

from evener.core.fleet import Device
from evener.core.plan import Plan
from evener.errors import EvenerError
from evener.session.journal import Outcome
from evener.session.launching.launch import launch
from evener.session.request import Request
from tests.faults import jobs
from tests.local.device.test_job import fleet
from tests.reference import plain_loop

pytestmark = pytest.mark.timeout(120)

SCRIPT = (
    jobs.DATA.replace("INPUTS", "torch.randint(0, 40, (48, 3), generator=g)")
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.EmbeddingBag(40, 5)
        self.head = nn.Linear(5, 3)
    def forward(self, x):
        return self.head(torch.tanh(self.emb(x)))

def recipe():
    return ev.Recipe(model=Model().double(), dataset=Data(), loss=nn.CrossEntropyLoss(), global_batch=12,
                     optimizer=lambda p: torch.optim.Adam(p, lr=0.02), place={place})
"""
)
A, B, C = jobs.NAMES
PARTS = {"emb": {A: 5, B: 3}}


def request_for(folder: Path, samples: tuple[int, ...], place: dict, steps: int, faults: str = "") -> Request:
    """Each device has the whole model but for the table."""
    plan = jobs.split(*samples)
    pipelines = [replace(p, stages=(replace(p.stages[0], layers=("emb", "head")),)) for p in plan.pipelines]
    wanted = jobs.request_for(
        folder, Plan(global_batch=12, pipelines=tuple(pipelines)), steps=steps, faults=faults
    )
    Path(wanted.script).write_text(SCRIPT.format(place=place, pause_s=0.004))
    return wanted


def error_of(outcome: Outcome, steps: int) -> float:
    """The most that a parameter of the run is off from a plain loop with a dense table."""
    torch.manual_seed(0)
    layers = {"emb": nn.EmbeddingBag(40, 5), "tanh": nn.Tanh(), "head": nn.Linear(5, 3)}
    model = nn.Sequential(OrderedDict(layers)).double()
    g = torch.Generator().manual_seed(1)
    x, y = torch.randint(0, 40, (48, 3), generator=g), torch.randint(0, 3, (48,), generator=g)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    plain_loop(model, optimizer, jobs.whole_batches(x, y, steps), jobs.mean_loss)
    found = load_file(Path(outcome.run_dir) / "model.safetensors")
    return max(float((found[n] - p.detach()).abs().max()) for n, p in model.named_parameters())


def rows_of(outcome: Outcome) -> dict[str, int]:
    (table,) = outcome.plan.tables
    return table.rows


@pytest.mark.parametrize("place", [PARTS, {"emb": {B: 1}}], ids=["two have rows", "one has"])
def test_a_device_without_rows_is_lost(tmp_path: Path, place: dict) -> None:
    outcome = launch(request_for(tmp_path, (5, 4, 3), place, 9, "leave lab/c at 3.5"))
    assert error_of(outcome, 9) <= 1e-10
    assert jobs.steps_of(outcome) == list(range(9))
    assert rows_of(outcome) == ({A: 25, B: 15} if place is PARTS else {A: 0, B: 40})


def test_a_device_without_rows_that_leads_is_killed(tmp_path: Path) -> None:
    wanted = request_for(tmp_path, (5, 4, 3), {"emb": {B: 2, C: 2}}, 16)
    outcome = jobs.signalled(wanted, A, signal.SIGKILL, 4)
    assert error_of(outcome, 16) <= 1e-10
    assert rows_of(outcome) == {B: 20, C: 20}


@pytest.mark.parametrize("device", [A, B, C])
def test_a_device_that_leaves_hands_its_rows_over(tmp_path: Path, device: str) -> None:
    wanted = request_for(tmp_path, (5, 4, 3), {"emb": "cpu"}, 24)
    outcome = jobs.signalled(wanted, device, signal.SIGTERM, 3)
    assert error_of(outcome, 24) <= 1e-10
    assert jobs.steps_of(outcome) == list(range(24))
    assert not any(s.startswith("generation 3") for s in outcome.decisions)
    stay = [d for d in (A, B, C) if d != device]
    assert set(rows_of(outcome)) == set(stay) and sum(rows_of(outcome).values()) == 40


def test_two_are_lost_one_after_the_other_in_the_middle_of_steps(tmp_path: Path) -> None:
    wanted = request_for(tmp_path, (5, 4, 3), {"emb": {B: 1}}, 9, "leave lab/c at 3.8; leave lab/a at 4.3")
    outcome = launch(wanted)
    assert error_of(outcome, 9) <= 1e-10
    assert jobs.steps_of(outcome) == list(range(9))


def test_a_stage_leaves_with_the_rows_of_its_host(tmp_path: Path) -> None:
    wanted = request_for(tmp_path, (7, 5), {"emb": "cpu"}, 24)
    outcome = jobs.signalled(replace(wanted, plan=jobs.in_a_row("emb", "head")), B, signal.SIGTERM, 3)
    assert error_of(outcome, 24) <= 1e-10
    assert rows_of(outcome) == {A: 40}


def test_one_device_is_left_with_all_rows(tmp_path: Path) -> None:
    wanted = request_for(tmp_path, (7, 5), PARTS, 24)
    outcome = jobs.signalled(wanted, A, signal.SIGTERM, 3)
    assert error_of(outcome, 24) <= 1e-10
    assert rows_of(outcome) == {B: 40}


def test_a_device_joins_without_rows_and_takes_over_those_of_one_that_leaves(tmp_path: Path) -> None:
    wanted = request_for(tmp_path, (7, 5), PARTS, 40, "join lab/c at 5")
    outcome = jobs.signalled(wanted, A, signal.SIGTERM, 16)
    assert error_of(outcome, 40) <= 1e-10
    assert any("lab/c joins" in s for s in outcome.decisions)
    assert rows_of(outcome) == {B: 40, C: 0}


def test_the_loss_of_rows_ends_the_job_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(EvenerError, match=r"lost \(.*\) held rows of the table emb") as caught:
        launch(request_for(tmp_path, (5, 4, 3), PARTS, 9, "leave lab/b at 3"))
    assert caught.value.code == "EV403" and "--resume" in caught.value.remedy


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_an_accelerator_leaves(tmp_path: Path, where: str) -> None:
    """How ids are read is not looked for again: the model is on the device by then."""
    cards = fleet(Device(name=A, kind="RTX 3080"), Device(name=B, kind="RTX 3060")).only((A, B))
    wanted = replace(request_for(tmp_path, (7, 5), {"emb": where}, 12), fleet=cards, rehearse=True)
    script = Path(wanted.script)
    script.write_text(script.read_text().replace(".double()", ""))
    outcome = jobs.signalled(wanted, B, signal.SIGTERM, 3)
    assert error_of(outcome, 12) <= 1e-5
    assert rows_of(outcome) == {A: 40}
