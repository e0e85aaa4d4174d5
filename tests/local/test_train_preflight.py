"""A job on several hosts is looked over before it trains: namespaces stand for the hosts."""

import json
import os
import time

import pytest

from evener.core.files import write
from evener.core.fleet import Device, Fleet
from tests.local.namespaces import Network, needs_root

pytestmark = [needs_root, pytest.mark.timeout(100)]

RECIPE = """
import torch
import evener as ev

def recipe():
    x = torch.randn(32, 4)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    return ev.Recipe(
        model=torch.nn.Linear(4, 1),
        dataset=data,
        loss=torch.nn.MSELoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        global_batch=8,
    )
"""


def train_here(folder, fleet, preflight):
    """One process of the job, as torchrun starts it; prints the steps and the interface it took."""
    from evener.errors import EvenerError
    from evener.session.ask import request_for
    from evener.session.launching.launch import run

    request = request_for(
        folder / "script.py",
        fleet=fleet,
        rehearse=None,
        devices=None,
        batch=None,
        batch_per_device=None,
        run_dir=folder / "run",
        steps=2,
        even=True,
        preflight=preflight,
    )
    try:
        outcome = run(request)
    except EvenerError as e:
        print(json.dumps({"error": str(e), "code": e.code}))
    else:
        steps = outcome.as_json()["steps"] if outcome else None
        print(json.dumps({"steps": steps, "over": os.environ.get("GLOO_SOCKET_IFNAME", "")}))


def job(network, count, folder, preflight=None):
    """What each process printed, what it said, and the seconds that took."""
    (folder / "script.py").write_text(RECIPE)
    devices = tuple(Device(name=f"lab{i + 1}/cpu", kind="cpu", threads=1) for i in range(count))
    write(folder / "fleet.json", Fleet(devices=devices))
    common = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": network.address(1),
        "MASTER_PORT": "29100",
    }
    begin = time.monotonic()
    running = [
        network.start(
            i + 1, train_here, folder, folder / "fleet.json", preflight, RANK=str(i), LOCAL_RANK="0", **common
        )
        for i in range(count)
    ]
    done = [process.finish() for process in running]
    return [(json.loads(out.splitlines()[-1]), err) for _, out, err in done], time.monotonic() - begin


def test_a_job_trains_over_the_interface_that_was_found(tmp_path):
    with Network(hosts=2, switches=2) as network:
        network.kill(1)
        done, _ = job(network, 2, tmp_path)
    (first, said), (second, _) = done
    assert first["steps"] == 2 and first["over"] == second["over"] == "eth0"
    assert "lab1/cpu listens on eth0" in said and "between hosts, one device each" in said
    verdict = json.loads((tmp_path / "run" / "preflight.json").read_text())
    assert verdict["ways"][0]["why"].endswith("data came back right over eth0 and eth0")


def test_a_dead_pair_ends_the_job_with_its_name_instead_of_a_hang(tmp_path):
    with Network(hosts=3, switches=1) as network:
        network.part_pair(2, 3)
        done, seconds = job(network, 3, tmp_path)
    for told, _ in done:
        assert told["code"] == "EV601"
        assert "lab2/cpu and lab3/cpu do not reach each other" in told["error"]
    assert json.loads((tmp_path / "run" / "preflight.json").read_text())["seconds"] < 10
    assert seconds < 40
