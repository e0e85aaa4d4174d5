"""The host that holds the job's store is lost: who joined from elsewhere goes on, where they are the most."""

import subprocess
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from evener.errors import DividedError, PeerLostError
from tests.faults.jobs import Job, undisturbed, within
from tests.local.namespaces import Network, needs_root

pytestmark = pytest.mark.timeout(120)

STEPS = 400
ALONE = ("--batch-per-device", "12")


class Guest:
    """A device that joined; what it says is kept."""

    def __init__(self, job: Job, host: int, folder: Path) -> None:
        self.folder, self.told = folder, []
        self.process: subprocess.Popen = job.join(host, "--run-dir", str(folder))
        self._ear = threading.Thread(target=lambda: self.told.extend(self.process.stderr), daemon=True)
        self._ear.start()
        assert within(60, lambda: "is in the job from step" in "".join(self.told)), self.told

    def ends(self, seconds: float = 60) -> tuple[int, str]:
        """(its exit code, what it said)."""
        code = self.process.wait(seconds)
        self._ear.join(5)
        return code, "".join(self.told)


def test_guests_go_on_when_the_host_of_the_store_is_killed(tmp_path: Path) -> None:
    fast = tmp_path / "fast"
    pause = f"0.0 if __import__('os').path.exists({str(fast)!r}) else 0.02"
    with Job(tmp_path, None, devices="cpu", steps=STEPS, split=ALONE, pause_s=pause) as job:
        guests = [Guest(job, 1, tmp_path / name) for name in ("one", "two")]
        assert job.takes_steps(3)
        job.process.kill()
        fast.touch()
        ends = [guest.ends() for guest in guests]
    assert [code for code, _ in ends] == [0, 0], ends
    assert all("the job's store is lost; those who are left meet at 127.0.0.1:" in said for _, said in ends)
    found = load_file(tmp_path / "one" / "model.safetensors")
    got = torch.cat([found[f"{n}.{kind}"].flatten() for n in (0, 2) for kind in ("weight", "bias")])
    wanted = undisturbed(STEPS)
    assert float((got - wanted).norm() / wanted.norm()) <= 1e-12


@needs_root
@pytest.mark.parametrize("devices", ["cpu,cpu", "cpu"])
def test_of_a_job_that_is_cut_in_two_one_part_goes_on(tmp_path: Path, devices: str) -> None:
    """2:2, where who has the store goes on, and 1:2, where the others do; never both."""
    split = ("--batch-per-device", "6,6" if "," in devices else "12")
    with (
        Network(hosts=3, switches=1) as network,
        Job(tmp_path, network, devices=devices, split=split, pause_s=0.01) as job,
    ):
        guests = [Guest(job, host, tmp_path / f"guest {host}") for host in (2, 3)]
        assert job.takes_steps(3)
        network.part(1)
        if "," in devices:
            ends = [guest.ends() for guest in guests]
            assert [code for code, _ in ends] == [PeerLostError.exit_code] * 2, ends
            assert all("does not reach the job's store" in said for _, said in ends), ends
            assert job.takes_steps(3) and job.process.poll() is None
        else:
            assert job.process.wait(60) == DividedError.exit_code
            assert within(5, lambda: DividedError.code in job.told_so_far), job.told_so_far
            metrics = guests[0].folder / "metrics.jsonl"
            goes_on = within(60, lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 3)
            assert goes_on, guests[0].told
            assert [guest.process.poll() for guest in guests] == [None, None]
