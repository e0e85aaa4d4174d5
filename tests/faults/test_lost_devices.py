"""K16 and its kin: real processes are killed, stopped, cut off, asked to leave, and join; nothing is lost."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from evener.core.faults import parse_faults
from evener.core.figures import Figure
from evener.core.fleet import Device, Fleet
from evener.core.order import epoch_order
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.errors import EvenerError, PeerLostError, RefusedError
from evener.report.metrics import read_metrics
from evener.session.journal import Outcome
from evener.session.launching.launch import launch
from evener.session.request import TOKEN_FILE, Request
from tests.local.namespaces import Network, needs_root

pytestmark = pytest.mark.timeout(120)

DATA = """
import time, torch, evener as ev
from torch import nn

torch.manual_seed(0)

class Data:
    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.x = INPUTS
        self.y = torch.randint(0, 3, (48,), generator=g)
    def __len__(self): return 48
    def __getitem__(self, i):
        time.sleep({pause_s})
        return self.x[i], self.y[i]
"""
SCRIPT = (
    DATA.replace("INPUTS", "torch.randn(48, 5, generator=g).{dtype}()")
    + """
def recipe():
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).{dtype}()
    return ev.Recipe(model=model, dataset=Data(), loss=nn.CrossEntropyLoss(), global_batch=12,
                     optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
"""
)
NAMES = ("lab/a", "lab/b", "lab/c")


def split(*samples: int) -> Plan:
    """One stage a device, as K16 has it."""
    pipelines = tuple(
        Pipeline(
            samples=n,
            micro_batch=n,
            stages=(Stage(layers=("0", "1", "2"), shares=(Share(devices=(d,), samples=n),)),),
        )
        for d, n in zip(NAMES, samples, strict=False)
    )
    return Plan(global_batch=12, pipelines=pipelines)


def in_a_row(*layers: str) -> Plan:
    stages = tuple(
        Stage(layers=tuple(row.split()), shares=(Share(devices=(d,), samples=4),))
        for row, d in zip(layers, NAMES, strict=False)
    )
    return Plan(global_batch=12, pipelines=(Pipeline(samples=12, micro_batch=4, stages=stages),))


def request_for(
    tmp_path: Path, plan: Plan, *, steps: int, faults: str = "", dtype: str = "double"
) -> Request:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT.format(dtype=dtype, pause_s=0.004))
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    count = len(plan.devices) + faults.count("join")
    return Request(
        fleet=Fleet(devices=tuple(Device(name=n, kind="cpu", threads=1) for n in NAMES[:count])),
        run_dir=str(folder),
        script=str(script),
        steps=steps,
        plan=plan,
        faults=parse_faults(faults),
        snapshot_every=2,
        quiet=True,
    )


def assumed(value: float) -> Figure:
    return Figure(value=value, source="assumed")


def undisturbed(steps: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """One process, in a plain loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(48, 5, generator=g).to(dtype), torch.randint(0, 3, (48,), generator=g)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        epoch, at = divmod(step * 12, 48)
        chosen = epoch_order(48, epoch, 0)[at : at + 12]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def error_of(outcome: Outcome, steps: int, dtype: torch.dtype = torch.float64) -> float:
    """How far the run's parameters are from the undisturbed ones, relative."""
    found = load_file(Path(outcome.run_dir) / "model.safetensors")
    got = torch.cat([found[f"{n}.{kind}"].flatten() for n in (0, 2) for kind in ("weight", "bias")])
    wanted = undisturbed(steps, dtype)
    return float((got - wanted).norm() / wanted.norm())


def steps_of(outcome: Outcome) -> list[int]:
    return [r.step for r in read_metrics(Path(outcome.run_dir) / "metrics.jsonl").records]


def signalled(
    request: Request, device: str, what: signal.Signals, after: int, back_s: float = 0.0
) -> Outcome:
    """The run, in which the process of `device` gets a signal after so many recorded steps."""
    metrics = Path(request.run_dir) / "metrics.jsonl"

    def strike() -> None:
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < after:
            time.sleep(0.002)
        (process,) = (p for p in multiprocessing.active_children() if p.name == device)
        assert process.pid is not None
        os.kill(process.pid, what)
        if back_s:
            time.sleep(back_s)
            os.kill(process.pid, signal.SIGCONT)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        return launch(request)
    finally:
        thread.join()


@pytest.mark.parametrize(("dtype", "bound"), [("double", 1e-12), ("float", 1e-6)])
def test_k16_a_process_that_exits_before_step_3_costs_nothing(tmp_path, dtype: str, bound: float) -> None:
    outcome = launch(request_for(tmp_path, split(5, 4, 3), steps=6, faults="leave lab/c at 3", dtype=dtype))
    assert error_of(outcome, 6, getattr(torch, {"double": "float64", "float": "float32"}[dtype])) <= bound
    assert [p.samples for p in outcome.plan.pipelines] == [7, 5]
    assert steps_of(outcome) == list(range(6))
    (told,) = (s for s in outcome.decisions if s.startswith("generation 2, "))
    assert (
        "before step 3: lab/c is lost (gone)" in told
        and "9 of 12 samples of step 3 are kept (lab/a 5, lab/b 4), the other 3 taken anew" in told
    )
    assert outcome.parameters_agree


@pytest.mark.parametrize("device", NAMES)
def test_a_process_killed_from_outside_the_leading_one_too(tmp_path, device: str) -> None:
    outcome = signalled(request_for(tmp_path, split(5, 4, 3), steps=16), device, signal.SIGKILL, 4)
    assert error_of(outcome, 16) <= 1e-12
    assert steps_of(outcome) == list(range(16))
    assert device not in outcome.plan.devices


def test_a_stopped_process_is_missed_within_a_second_and_comes_back(tmp_path) -> None:
    request = request_for(tmp_path, split(5, 4, 3), steps=120)
    outcome = signalled(request, "lab/c", signal.SIGSTOP, 3, back_s=1.6)
    assert error_of(outcome, 120) <= 1e-12
    told = [s for s in outcome.decisions if s.startswith("generation") and ", before step" in s]
    assert "lab/c is lost (silent for" in told[0] and "lab/c joins" in told[1]
    assert sorted(set(steps_of(outcome))) == list(range(120))


def test_a_device_asked_to_leave_hands_over_and_no_step_is_taken_twice(tmp_path) -> None:
    outcome = signalled(request_for(tmp_path, in_a_row("0 1", "2"), steps=24), "lab/b", signal.SIGTERM, 3)
    assert error_of(outcome, 24) <= 1e-12
    assert steps_of(outcome) == list(range(24))
    assert any("lab/b leaves as it was asked to" in s for s in outcome.decisions)


@pytest.mark.parametrize("device", ["lab/a", "lab/b"])
def test_a_rehearsed_device_hands_over_what_it_alone_holds(tmp_path, device: str) -> None:
    """What it sends takes the seconds of its links, which the fleet of those that stay does not name."""
    request = request_for(tmp_path, in_a_row("0 1", "2"), steps=24)
    paced = Device(
        name="lab/a",
        kind="paced",
        threads=1,
        flops={"float64": assumed(1e9)},
        bytes_per_s=assumed(1e9),
        launch_s=assumed(1e-5),
    )
    devices = tuple(msgspec.structs.replace(paced, name=d.name) for d in request.fleet.devices)
    request = msgspec.structs.replace(request, rehearse=True, fleet=Fleet(devices=devices))
    outcome = signalled(request, device, signal.SIGTERM, 3)
    assert error_of(outcome, 24) <= 1e-12
    assert steps_of(outcome) == list(range(24))
    assert any(f"{device} leaves as it was asked to" in s for s in outcome.decisions)


@pytest.mark.parametrize("device", ["lab/a", "lab/b", "lab/c"])
def test_what_only_the_lost_device_held_comes_from_its_neighbour(tmp_path, device: str) -> None:
    plan = in_a_row("0", "1", "2")
    outcome = launch(request_for(tmp_path, plan, steps=12, faults=f"leave {device} at 7.5"))
    assert error_of(outcome, 12) <= 1e-12
    told = next(s for s in outcome.decisions if s.startswith("generation 2, "))
    assert ("back to the copies of before step 6" in told) == (device != "lab/b")  # it holds no parameter


def test_a_device_that_is_cut_off_does_not_go_on_alone(tmp_path) -> None:
    request = request_for(tmp_path, split(6, 6), steps=100, faults="cut lab/a|lab/b at 3 for 1.5s")
    outcome = launch(request)
    assert error_of(outcome, 100) <= 1e-12
    assert any("lab/b is lost (silent for" in s for s in outcome.decisions)


def test_a_device_joins_from_the_step_that_the_script_says_and_holds_the_same(tmp_path) -> None:
    outcome = launch(
        request_for(tmp_path, split(6, 6), steps=30, faults="join lab/c at 5; leave lab/a at 15")
    )
    assert error_of(outcome, 30) <= 1e-12
    assert steps_of(outcome) == list(range(30))
    assert any("lab/c joins" in s for s in outcome.decisions)
    assert outcome.plan.devices == ("lab/b", "lab/c") and outcome.parameters_agree


def test_without_elastic_a_lost_device_ends_the_run(tmp_path) -> None:
    import msgspec

    request = msgspec.structs.replace(request_for(tmp_path, split(6, 6), steps=200), elastic=False)
    with pytest.raises(PeerLostError, match="lab/b was ended by SIGKILL"):
        signalled(request, "lab/b", signal.SIGKILL, 2)


def test_when_all_copies_are_gone_the_error_says_what_is_missing(tmp_path) -> None:
    import msgspec

    request = request_for(tmp_path, in_a_row("0 1", "2"), steps=12, faults="leave lab/b at 3")
    with pytest.raises(EvenerError, match="only lost devices held 2"):
        launch(msgspec.structs.replace(request, snapshot_every=0))


class Job:
    """A long run of `evener train` on host 1 of a network, that others may join from other hosts."""

    def __init__(
        self,
        tmp_path: Path,
        network: Network | None,
        *,
        devices: str = "cpu,cpu",
        steps: int = 1000000,
        split: tuple[str, ...] = ("--batch", "12", "--micro-batch", "6"),
        pause_s: float | str = 0.002,
    ) -> None:
        self.folder, self.script = tmp_path / "run", tmp_path / "job.py"
        self.script.write_text(SCRIPT.format(dtype="double", pause_s=pause_s))
        self._network, self._started = network, []
        at = f"{network.address(1)}:0" if network else "127.0.0.1:0"
        words = (
            "--devices",
            devices,
            "--steps",
            str(steps),
            "--no-adapt",
            "--run-dir",
            str(self.folder),
            "--open-at",
            at,
        )
        self.process = self._start(1, *words, *split)
        self.address, self.told = "", []
        for line in self.process.stderr:
            self.told.append(line)
            if "--join" in line:
                self.address = line.split("--join ")[1].split()[0]
                break
        threading.Thread(target=lambda: self.told.extend(self.process.stderr), daemon=True).start()
        assert self.takes_steps(1), self.told_so_far

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._started:
            process.kill()
            process.wait()

    def _start(self, host: int, *words: str, script: Path | None = None) -> subprocess.Popen:
        inside = self._network.entering(host) if self._network else []
        command = [
            *inside,
            sys.executable,
            "-m",
            "evener.cli.main",
            "train",
            str(script or self.script),
            *words,
        ]
        streams = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
        self._started.append(subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **streams))
        return self._started[-1]

    def join(
        self, host: int, *more: str, token: Path | None = None, script: Path | None = None
    ) -> subprocess.Popen:
        token = token or self.folder / TOKEN_FILE
        words = ("--join", self.address, "--token-file", str(token), "--devices", "cpu")
        return self._start(host, *words, *more, script=script)

    @property
    def told_so_far(self) -> str:
        return "".join(self.told)[-3000:]

    def says(self, words: str, within_s: float) -> bool:
        return _within(within_s, lambda: any(words in line for line in self.told))

    def takes_steps(self, count: int) -> bool:
        metrics = self.folder / "metrics.jsonl"

        def taken() -> int:
            return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

        before = taken()
        return _within(60, lambda: taken() >= before + count)


def _within(seconds: float, happens) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if happens():
            return True
        time.sleep(0.02)
    return False


@needs_root
def test_a_device_of_another_host_joins_and_its_cable_is_cut(tmp_path) -> None:
    with Network(hosts=2, switches=1) as network, Job(tmp_path, network) as job:
        guest = job.join(2)
        assert job.says("joins", within_s=60), job.told_so_far
        assert job.takes_steps(3)
        network.kill(0)
        assert job.says("is lost (silent for", within_s=10), job.told_so_far
        assert job.takes_steps(3)
        assert guest.wait(60) != 0  # it never went on alone


def test_who_may_not_join_is_told_why_and_the_job_goes_on(tmp_path) -> None:
    with Job(tmp_path, None) as job:
        wrong = tmp_path / "wrong-token"
        wrong.write_text("not the token")
        other = tmp_path / "other.py"
        text = job.script.read_text()
        other.write_text(text.replace("nn.Linear(5, 7)", "nn.Linear(5, 9)").replace("(7, 3)", "(9, 3)"))
        strangers = [job.join(1, token=wrong), job.join(1, script=other)]
        assert [s.wait(60) for s in strangers] == [RefusedError.exit_code] * 2
        first, second = (s.stderr.read() for s in strangers)
        assert "the token is not that of this job" in first
        assert "another script" in second and "another model" in second
        assert job.says("refused a device at 127.0.0.1", within_s=5)
        assert (job.folder / TOKEN_FILE).stat().st_mode & 0o077 == 0
        assert job.takes_steps(3)
