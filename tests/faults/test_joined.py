"""Who joins a job from another terminal reads there what becomes of it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from evener.core.figures import Figure
from evener.core.files import write
from evener.core.fleet import Device, Fleet

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import time, torch, evener as ev
from torch import nn

class Data:
    def __len__(self): return 64
    def __getitem__(self, i):
        time.sleep(0.005)
        return torch.ones(5), 1

def recipe():
    torch.manual_seed(0)
    return ev.Recipe(model=nn.Linear(5, 3), dataset=Data(), loss=nn.CrossEntropyLoss(), global_batch=8,
                     optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
"""


def assumed(value: float) -> Figure:
    return Figure(value=value, source="assumed")


def train(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "evener.cli.main", "train", *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_a_guest_is_told_when_it_is_known_when_it_takes_part_and_when_all_is_over(tmp_path: Path) -> None:
    paced = Device(
        name="lab/a",
        kind="paced",
        threads=1,
        flops={"float32": assumed(1e9)},
        bytes_per_s=assumed(1e9),
        launch_s=assumed(1e-5),
    )
    other = Device(**{f: getattr(paced, f) for f in paced.__struct_fields__} | {"name": "lab/b"})
    fleet, script = tmp_path / "fleet.json", tmp_path / "job.py"
    write(fleet, Fleet(devices=(paced, other)))
    script.write_text(SCRIPT)
    rehearsed = ("--rehearse", str(fleet), "--run-dir")
    alone = ("--devices", "lab/a", "--batch-per-device", "8", "--steps", "500")
    with train(str(script), *rehearsed, str(tmp_path / "run"), *alone) as job:
        assert job.stderr is not None
        told = ""
        while "step 1/" not in told:
            told += job.stderr.readline()
        way = re.search(r"--join (\S+) --token-file (\S+)", told)
        assert way is not None
        words = (*rehearsed, str(tmp_path / "guest"), "--join", way[1], "--token-file", way[2], "--devices")
        with train(str(script), *words, "lab/a") as double, train(str(script), *words, "lab/b") as guest:
            assert double.stderr is not None and guest.stderr is not None
            refused, said = double.stderr.read(), guest.stderr.read()
        job.stderr.read()
    assert double.returncode == 2 and "--devices with another one" in refused, refused
    assert "there is a device lab/a in the job" in refused and " joins" not in refused
    assert job.returncode == guest.returncode == 0, said
    known, joined, over = said.splitlines()
    assert "knows lab/b, which joins once its model is loaded" in known
    assert re.fullmatch(r"evener: lab/b is in the job from step \d+ on, with a part", joined)
    assert over.startswith("evener: the job has ended")
