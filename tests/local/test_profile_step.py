"""One step under torch's profiler on every device, and a run that is watched while it trains."""

import io
import json
import threading
import urllib.request
from pathlib import Path

import pytest

from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.report.page.files import read_run
from evener.report.profiled import DeviceProfile, is_action, read_profiled, use
from evener.serving.watching import watching
from evener.session.launching.launch import launch
from evener.session.request import Request

A, B = "lab/a", "lab/b"
SCRIPT = """
import torch, evener as ev
from torch import nn

def recipe():
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    y = torch.randint(0, 3, (64,), generator=torch.Generator().manual_seed(2))
    return ev.Recipe(
        model=nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 3)), dataset=list(zip(x, y)),
        global_batch=8, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
"""


def stage(layers: str, device: str) -> Stage:
    return Stage(layers=tuple(layers.split()), shares=(Share(devices=(device,), samples=2),))


PLAN = Plan(
    global_batch=8,
    pipelines=(Pipeline(samples=8, micro_batch=2, stages=(stage("0 1", A), stage("2", B))),),
    schedule="1f1b",
)


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> tuple[Path, str]:
    """The folder of a pipeline's run that was served, and what Prometheus read during it."""
    folder = tmp_path_factory.mktemp("run")
    script = folder / "job.py"
    script.write_text(SCRIPT)
    fleet = Fleet(devices=tuple(Device(name=n, kind=f"CPU of {n}", threads=1) for n in (A, B)))
    request = Request(
        script=str(script), fleet=fleet, plan=PLAN, run_dir=str(folder), steps=7, quiet=True, profile_step=3
    )
    said: list[str] = []
    read = io.StringIO()

    def scrape() -> None:
        address = said[0].removeprefix("live view: ") + "metrics"
        while not ended.wait(0.1):
            try:
                text = urllib.request.urlopen(address, timeout=5).read().decode()
            except OSError:
                continue  # no plan yet
            read.seek(0)
            read.write(text)

    ended = threading.Event()
    with watching(folder, listen="127.0.0.1:0", log_to=(), say=said.append):
        scraper = threading.Thread(target=scrape)
        scraper.start()
        try:
            launch(request)
        finally:
            ended.wait(1.5)
            ended.set()
            scraper.join()
    return folder, read.getvalue()


def profiles(folder: Path) -> tuple[DeviceProfile, ...]:
    return read_profiled((folder / "profiled-step.json").read_bytes())


def test_every_device_is_in_one_trace_with_its_actions_as_ranges(watched) -> None:
    first, second = profiles(watched[0])
    assert [(p.device, p.type, p.step) for p in (first, second)] == [(A, "cpu", 3), (B, "cpu", 3)]
    named = [{e.name for e in p.events if is_action(e)} for p in (first, second)]
    forwards = [{f"{stage}F{m}" for m in range(4)} for stage in (0, 1)]
    assert forwards[0] | {"0SEND_F0", "0RECV_B3", "STEP", "INPUT"} <= named[0]
    assert forwards[1] | {"1RECV_F0", "1SEND_B3", "STEP", "INPUT"} <= named[1]
    assert any(e.name.startswith("aten::") for e in first.events)


def test_operators_lie_inside_of_their_actions(watched) -> None:
    for profile in profiles(watched[0]):
        forwards = [e for e in profile.events if is_action(e) and "F" in e.name and "_" not in e.name]
        assert len(forwards) == 4
        for f in forwards:
            inside = [
                e
                for e in profile.events
                if e.name == "aten::addmm"
                and f.start_us <= e.start_us
                and e.start_us + e.length_us <= f.start_us + f.length_us
            ]
            assert len(inside) == 1, f"{f.name} of {profile.device} is one linear layer"


def test_use_and_communication_follow(watched) -> None:
    for profile in profiles(watched[0]):
        found = use(profile)
        assert 0 < found.busy < 1 and 0 < found.exposed <= found.communication < 1
        assert found.operators


def test_the_run_says_that_the_step_was_profiled(watched) -> None:
    run = read_run(watched[0])
    assert any("step 3 ran under torch's profiler on 2 devices" in s for s in run.ending.decisions)
    assert run.info.total_steps == 7 and run.problems == ()
    assert set(run.ending.peak_bytes) == {A, B}
    assert all(f.source == "measured" and f.value > 1e6 for f in run.ending.peak_bytes.values())


def test_the_run_was_seen_while_it_trained(watched) -> None:
    text = watched[1]
    assert "evener_planned_steps 7.0" in text and "evener_steps_total 7.0" in text
    losses = [json.loads(line)["loss"] for line in (watched[0] / "metrics.jsonl").read_text().splitlines()]
    assert f"evener_loss {losses[-1]}" in text
