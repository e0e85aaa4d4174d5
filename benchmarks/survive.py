"""From kill -9 to the next committed step: how long is the job without one, and where does the time go?

    python benchmarks/survive.py --json [--repeats 5]

The text model's layers in small, on real processes of one thread: a data-parallel job of three, where
replicas hold the state, and a pipeline of three, where it comes from the copies of a neighbour. The time from
the signal to what the survivors notice is taken from outside; the rest they tell themselves
(generations.jsonl). Beside it: a planned leave (SIGTERM), which must cost no step, and a stopped process
(SIGSTOP), which only the heartbeat can miss.
"""

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from common import Bar, finish, parser, say
from soak_task import plan_of, write_recipe

from evener.core.fleet import Device, Fleet
from evener.report.metrics import read_metrics
from evener.session.launch import launch
from evener.session.members.passage import Passage
from evener.session.request import Request

DEVICES = ("lab/a", "lab/b", "lab/c")
EPOCHS = 8
CASES = {
    "kill, replicas": ("data-parallel", signal.SIGKILL),
    "kill, copies": ("pipeline", signal.SIGKILL),
    "stop, replicas": ("data-parallel", signal.SIGSTOP),
    "leave, pipeline": ("pipeline", signal.SIGTERM),
}


def once(folder: Path, shape: str, what: signal.Signals, victim: str, seed: int) -> dict[str, float]:
    """Seconds by part of one run in which the process of `victim` gets the signal `what`."""
    recipe = folder / "survive_recipe.py"
    write_recipe(recipe, "adamw", None)
    run = folder / f"{shape}-{what.name}-{seed}"
    run.mkdir()
    request = Request(
        fleet=Fleet(devices=tuple(Device(name=d, kind="cpu", threads=1) for d in DEVICES)),
        run_dir=str(run),
        script=str(recipe),
        epochs=EPOCHS,
        plan=plan_of(shape, list(DEVICES), random.Random(seed)),
        snapshot_every=5,
        quiet=True,
    )
    struck: list[float] = []
    thread = threading.Thread(target=_strike, args=(run, what, victim, struck))
    thread.start()
    launch(request)
    thread.join()
    passages = [
        msgspec.json.decode(x, type=Passage) for x in (run / "generations.jsonl").read_bytes().splitlines()
    ]
    records = read_metrics(run / "metrics.jsonl").records
    step_s = median(r.step_s for r in records)
    taken = [r.step for r in records]
    parts = {"notice": passages[0].noticed_at_s - struck[0], **passages[0].parts_s}
    return {
        "total_s": sum(parts.values()),
        "step_s": step_s,
        "steps taken twice": float(len(taken) - len(set(taken))),
        **{f"{name}_s": seconds for name, seconds in parts.items()},
    }


def _strike(run: Path, what: signal.Signals, victim: str, struck: list[float]) -> None:
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 12:
        time.sleep(0.001)
    for process in multiprocessing.active_children():
        if process.name == victim and process.pid:
            struck.append(time.time())
            os.kill(process.pid, what)
            if what == signal.SIGSTOP:
                threading.Timer(4.0, _end, args=(process,)).start()


def _end(process) -> None:
    process.kill()


def main() -> int:
    p = parser("How long is a job without a step when a device is lost?")
    p.add_argument("--repeats", type=int, default=5)
    args = p.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        for name, (shape, what) in CASES.items():
            runs = []
            for seed in range(1 if args.quick else args.repeats):
                victim = DEVICES[seed % len(DEVICES)] if shape == "data-parallel" else DEVICES[2 * (seed % 2)]
                runs.append(once(Path(root), shape, what, victim, seed))
            figures[name] = {part: median(r.get(part, 0.0) for r in runs) for part in runs[0]}
            figures[name]["worst_total_s"] = max(r["total_s"] for r in runs)
            told = ", ".join(
                f"{k.removesuffix('_s')} {1000 * v:.0f}" for k, v in figures[name].items() if k.endswith("_s")
            )
            say(f"{name}: {told} ms (medians of {len(runs)})")
    bars = [
        Bar(
            name="kill, replicas: seconds beyond one step",
            value=figures["kill, replicas"]["worst_total_s"] - figures["kill, replicas"]["step_s"],
            at_most=1.0,
        ),
        Bar(name="kill, copies: seconds", value=figures["kill, copies"]["worst_total_s"], at_most=5.0),
        Bar(
            name="stop, replicas: seconds until noticed",
            value=figures["stop, replicas"]["notice_s"],
            at_most=1.0 + figures["stop, replicas"]["step_s"],
        ),
        Bar(
            name="planned leave: steps taken twice",
            value=figures["leave, pipeline"]["steps taken twice"],
            at_most=0.0,
        ),
    ]
    return finish(figures, bars, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
