"""Small jobs to do harm to: three devices and few steps, or a long run of `evener train` that others join."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from evener.core.faults import parse_faults
from evener.core.fleet import Device, Fleet
from evener.core.order import epoch_order
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.report.metrics import read_metrics
from evener.session.journal import Outcome
from evener.session.launching.launch import launch
from evener.session.request import TOKEN_FILE, Request
from tests.local.namespaces import Network
from tests.reference import plain_loop

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
Batch = tuple[torch.Tensor, torch.Tensor]


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


def whole_batches(x: torch.Tensor, y: torch.Tensor, steps: int) -> list[Batch]:
    """What one device trains on in so many steps."""
    places = (divmod(step * 12, 48) for step in range(steps))
    chosen = (epoch_order(48, epoch, 0)[at : at + 12] for epoch, at in places)
    return [(x[c], y[c]) for c in chosen]


def mean_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def undisturbed(steps: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """One process, in a plain loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(48, 5, generator=g).to(dtype), torch.randint(0, 3, (48,), generator=g)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain_loop(model, optimizer, whole_batches(x, y, steps), mean_loss)
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
        return within(within_s, lambda: any(words in line for line in self.told))

    def takes_steps(self, count: int) -> bool:
        metrics = self.folder / "metrics.jsonl"

        def taken() -> int:
            return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

        before = taken()
        return within(60, lambda: taken() >= before + count)


def within(seconds: float, happens) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if happens():
            return True
        time.sleep(0.02)
    return False
