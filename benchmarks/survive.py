"""From kill -9 to the next committed step: how long is the job without one, and where does the time go?

    python benchmarks/survive.py --json [--repeats 5]

The text model's layers in small, on real processes of one thread: a data-parallel job of three, where
replicas hold the state, and a pipeline of three, where it comes from the copies of a neighbour. The time from
the signal to what the survivors notice is taken from outside; the rest they tell themselves
(generations.jsonl). Beside it: a planned leave (SIGTERM), which must cost no step, and a stopped process
(SIGSTOP), which only the heartbeat can miss. And the text example on a paced fleet, whose steps are long: a
device is killed when a half of one is done, and only its own samples are taken anew.
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
from common import TEXT, Bar, finish, fleet_named, parser, say
from soak_task import plan_of, write_recipe

from evener.core.fleet import Device, Fleet
from evener.report.metrics import read_metrics
from evener.session.launching.launch import launch
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


LONG_FLEET, LONG_BATCH, LONG_MICRO_BATCH = "8-4-2-2", 960, 15
LONG_VICTIM, LONG_PHASES = "lab1/b", (0.5, 0.95)  # it has a quarter of the samples
KILLED_AFTER, LONG_STEPS = 2, 5


def long_step(folder: Path, phase: float) -> dict[str, float]:
    """Seconds from a kill when `phase` of a long step is done until that step is committed, over a step's.

    `rest_over_step` is without what was left of the step for the survivors' own samples.
    """
    fleet = fleet_named(LONG_FLEET)
    run = folder / "run"
    run.mkdir()
    unit = LONG_BATCH // 16
    request = Request(
        script=str(TEXT),
        fleet=fleet,
        rehearse=True,
        run_dir=str(run),
        steps=LONG_STEPS,
        batch_per_device={d.name: n * unit for d, n in zip(fleet.devices, (8, 4, 2, 2), strict=True)},
        global_batch=LONG_BATCH,
        micro_batch=LONG_MICRO_BATCH,
        evaluate=False,
        adapt=False,
        quiet=True,
    )
    struck: list[float] = []
    thread = threading.Thread(target=_strike_in_a_step, args=(run, LONG_VICTIM, phase, struck))
    thread.start()
    outcome = launch(request)
    thread.join()
    (passage,) = [
        msgspec.json.decode(x, type=Passage) for x in (run / "generations.jsonl").read_bytes().splitlines()
    ]
    step_s = median(r.step_s for r in read_metrics(run / "metrics.jsonl").records[1:KILLED_AFTER])
    total_s = passage.noticed_at_s + sum(passage.parts_s.values()) - struck[0]
    say(next(sentence for sentence in outcome.decisions if sentence.startswith("generation 2, ")))
    return {
        "step_s": step_s,
        "total_s": total_s,
        "rest_over_step": total_s / step_s - (1 - phase),
        "regrouping_s": sum(s for part, s in passage.parts_s.items() if part != "first step"),
    }


def _strike_in_a_step(run: Path, victim: str, phase: float, struck: list[float]) -> None:
    """Records come one step late: the one of step n - 1 says how long a step is and when n + 1 began."""
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < KILLED_AFTER:
        time.sleep(0.001)
    time.sleep(phase * read_metrics(metrics).records[-1].step_s)
    for process in multiprocessing.active_children():
        if process.name == victim and process.pid:
            struck.append(time.time())
            os.kill(process.pid, signal.SIGKILL)


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
    for phase in LONG_PHASES[: 1 if args.quick else None]:
        with tempfile.TemporaryDirectory() as root:
            run = figures[f"kill, {phase:.0%} of a long step done"] = long_step(Path(root), phase)
        say(
            f"kill when {phase:.0%} of a step of {run['step_s']:.2f} s is done: "
            f"committed {run['total_s']:.2f} s later"
        )
    bars = [
        Bar(
            name="kill in a long step: steps until it is committed, beyond what was left of it",
            value=max(run["rest_over_step"] for name, run in figures.items() if "long step" in name),
            at_most=0.5,
        ),
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
