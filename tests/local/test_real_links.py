"""A rehearsal whose hosts are namespaces with shaped links: as exact as any, as long as a paced one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evener.core.figures import Figure, line
from evener.core.files import write
from evener.core.fleet import Device, Fleet, Link
from evener.session.launching.launch import launch
from evener.session.request import Request
from tests.local.namespaces import needs_root

pytestmark = [needs_root, pytest.mark.timeout(120)]
MBIT = 100
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import evener as ev


def recipe():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 8))
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    return ev.Recipe(
        model=model,
        dataset=TensorDataset(x, (x[:, 0] > 0).long()),
        loss=nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
        global_batch=16,
    )
"""


def fleet() -> Fleet:
    flops = {"float32": Figure(value=2e9, source="assumed")}
    devices = tuple(Device(name=f"{host}/0", kind="k", flops=flops) for host in ("lab1", "lab2"))
    return Fleet(devices=devices, links=(Link(a="lab1", b="lab2", curve=line(3e-4, MBIT / 8 * 1e6)),))


def trained(folder: Path, *, real_links: bool):
    folder.mkdir()
    (folder / "job.py").write_text(SCRIPT, encoding="utf-8")
    request = Request(
        fleet=fleet(),
        run_dir=str(folder / "run"),
        script=str(folder / "job.py"),
        rehearse=True,
        real_links=real_links,
        steps=8,
        even=True,
        adapt=False,
        evaluate=False,
        profile_s=3.0,
        quiet=True,
    )
    return launch(request)


def exchange_s(outcome) -> float:
    """Seconds of a step that devices wait for sums, the mean."""
    assert outcome.report is not None
    return sum(d.seconds["reduce"] for d in outcome.report.devices) / len(outcome.report.devices)


def test_real_links_take_as_long_as_paced_ones_and_sum_the_same(tmp_path) -> None:
    paced = trained(tmp_path / "paced", real_links=False)
    real = trained(tmp_path / "real", real_links=True)
    assert real.parameters_agree and paced.parameters_agree
    assert real.report.loss_last == paced.report.loss_last < real.report.loss_first
    assert exchange_s(real) == pytest.approx(exchange_s(paced), rel=0.15)
    # 595,464 parameters of 4 bytes each cross the link once either way: 0.19 s at 12.5 MB/s.
    assert exchange_s(real) > 0.15


def _started(folder: Path) -> tuple[subprocess.Popen, list[int]]:
    """A job in namespaces that trains for long, and its processes."""
    (folder / "job.py").write_text(SCRIPT, encoding="utf-8")
    write(folder / "fleet.json", fleet())
    words = ["train", "job.py", "--rehearse", "fleet.json", "--real-links", "--steps", "100000"]
    parent = subprocess.Popen(
        [sys.executable, "-m", "evener.cli.main", *words, "--run-dir", "run"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stderr is not None
    for text in parent.stderr:
        if "process ids:" in text:
            return parent, [int(w.rstrip(",")) for w in text.split() if w.rstrip(",").isdigit()]
    raise AssertionError("no processes were started")


def _namespaces_in_use() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(path))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_after_an_end_from_outside(tmp_path, how: signal.Signals) -> None:
    own = os.readlink("/proc/self/ns/net")
    parent, ids = _started(tmp_path)
    try:
        places: set[str] = set()
        end = time.monotonic() + 20
        while len(places) < 2 and time.monotonic() < end:
            places = {os.readlink(f"/proc/{i}/ns/net") for i in ids} - {own}
            time.sleep(0.05)
        assert len(places) == 2, "each host has a namespace of its own"
    finally:
        parent.send_signal(how)
        parent.wait(30)
        parent.stderr.close()
    end = time.monotonic() + 20
    while places & _namespaces_in_use() and time.monotonic() < end:
        time.sleep(0.05)
    assert not places & _namespaces_in_use()
    assert os.readlink("/proc/self/ns/net") == own
