"""A device is lost before the first generation: nobody has anything to go on with, and one error says so."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evener.core.files import write
from evener.core.fleet import Device, Fleet

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import torch, evener as ev
from torch import nn

def recipe():
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 5), torch.randint(0, 3, (64,)))
    return ev.Recipe(model=nn.Linear(5, 3), dataset=data, loss=nn.CrossEntropyLoss(), global_batch=8,
                     optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
"""
DEVICES = tuple(Device(name=f"lab/{n}", kind=f"cpu {n}", threads=1) for n in "abc")


@pytest.mark.parametrize("after", ["process ids", "measuring the model"])
def test_one_error_names_the_lost_device_and_nothing_says_that_others_go_on(
    tmp_path: Path, after: str
) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    write(tmp_path / "fleet.json", Fleet(devices=DEVICES))
    command = [sys.executable, "-m", "evener.cli.main", "train", str(tmp_path / "job.py"), "--steps", "20"]
    command += ["--fleet", str(tmp_path / "fleet.json"), "--run-dir", str(tmp_path / "run")]
    told = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        assert job.stderr is not None
        for line in job.stderr:
            told.append(line)
            if after in line:
                pid = re.search(r"lab/c (\d+)", "".join(told))
                assert pid is not None
                os.kill(int(pid[1]), signal.SIGKILL)
    said = "".join(told)
    assert job.returncode == 2
    assert said.count("the process of lab/c was ended by SIGKILL and said nothing") == 1, said
    assert "EV401" in said and "EV000" not in said and "Traceback" not in said, said
    assert "go on\n" not in said and " ends: " not in said, said
