"""Random trouble for real processes: does every run end as the undisturbed one would have?

    python benchmarks/soak.py --count 200 --seed 0 --json

Each script draws 2 to 4 processes, a plan (data parallel, pipeline, hybrid), an optimiser, and one to three
events: a process that kills itself between two actions, one that is killed or stopped from outside at any
instant (inside a reduction or the commit too), one cut off for a while, one that joins, one that runs out of
memory, one asked to leave (SIGTERM). Some data-parallel plans steal, some devices are rehearsed. Checked: it
ends in time, in float64 its parameters are those of a plain loop to 1e-10, each step's loss is that loop's
(so no sample is lost or doubled), and each loss of a device stands among the decisions with its reason.
"""

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import torch
from common import Bar, finish, parser, say
from msgspec.structs import replace
from safetensors.torch import load_file
from soak_task import BATCH, EPOCHS, SAMPLES, plan_of, reference, write_recipe

from evener.core.faults import FaultScript, parse_faults
from evener.core.figures import Figure, Value
from evener.core.fleet import Device, Fleet
from evener.core.plan import Plan
from evener.errors import EvenerError
from evener.report.metrics import read_metrics
from evener.session.journal import Outcome
from evener.session.launching.launch import launch
from evener.session.request import Request, folder_at

STEPS = EPOCHS * SAMPLES // BATCH
BOUND = 1e-10
LATE_S = 90.0
REHEARSED = Device(
    name="lab0/0",
    kind="paced 1 GFLOP/s",
    threads=1,
    flops={"float64": Figure(value=1e9, source="assumed")},
    bytes_per_s=Figure(value=1e9, source="assumed"),
    launch_s=Figure(value=1e-5, source="assumed"),
)
FROM_OUTSIDE = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "ask": signal.SIGTERM}


class Script(Value, frozen=True, kw_only=True):
    """One run: who, under which plan, and what happens to them.

    `outside` are (what, device, after so many steps were recorded, seconds later).
    """

    number: int
    shape: str
    devices: tuple[str, ...]
    plan: Plan
    optimizer: str
    max_norm: float | None
    faults: FaultScript
    outside: tuple[tuple[str, str, int, float], ...] = ()
    rehearsed: bool

    def __str__(self) -> str:
        outside = "; ".join(f"{w} {d} {s:.3f} s after step {n}" for w, d, n, s in self.outside)
        events = "; ".join(filter(None, (str(self.faults), outside)))
        shape = ", ".join((self.shape, *["stealing"] * self.plan.steal, *["rehearsed"] * self.rehearsed))
        return f"script {self.number}: {len(self.devices)} devices, {shape}, {self.optimizer}: {events}"


def draw(number: int, seed: int) -> Script:
    """The script of this number."""
    rng = random.Random(f"{seed} {number}")
    count = rng.randint(2, 4)
    devices = [f"lab{i % 2}/{i}" for i in range(count)]
    shape = rng.choice(("data-parallel", "data-parallel", "pipeline", "hybrid"))
    if shape == "hybrid" and count < 3:
        shape = "pipeline"
    later = [devices[-1]] if count > 2 and shape == "data-parallel" and rng.random() < 0.4 else []
    starting = [d for d in devices if d not in later]
    events, outside = [], []
    if later:
        events.append(f"join {later[0]} at {rng.randint(1, 6)}")
    # One at a time where only one device holds a layer: two at once may take the copy along with it.
    losses = rng.randint(1, min(2, len(starting) - 1)) if len(starting) > 1 else 0
    at = rng.uniform(1, 5)
    for victim in rng.sample(starting, losses):
        what = rng.choice(("leave", "kill", "kill", "stop", "ask", "cut"))
        if what == "leave":
            events.append(f"leave {victim} at {at:.2f}")
        elif what == "cut" and victim != starting[0]:
            events.append(f"cut {starting[0]}|{victim} at {at:.2f} for {rng.choice((0.3, 1.5))}s")
        else:
            outside.append((what if what in FROM_OUTSIDE else "kill", victim, int(at), rng.uniform(0, 0.08)))
        at += rng.uniform(3, 5)
    plan = plan_of(shape, starting, rng)
    smallest = min(p.micro_batch for p in plan.pipelines)
    if rng.random() < 0.3 and shape == "data-parallel" and smallest > 1:  # one sample cannot be halved
        events.append(f"oom {rng.choice(starting)} at {rng.randint(1, 12)}")
    optimizer, max_norm = rng.choice(("sgd", "adamw")), rng.choice((None, 0.5))
    steal = plan.is_data_parallel and rng.random() < 0.3
    return Script(
        number=number,
        shape=shape,
        devices=tuple(devices),
        plan=replace(plan, steal=steal),
        optimizer=optimizer,
        max_norm=max_norm,
        faults=parse_faults("; ".join(events)),
        outside=tuple(outside),
        rehearsed=not steal and rng.random() < 0.3,
    )


def play(script: Script, folder: Path, recipe: Path) -> tuple[Outcome | str, float]:
    """The outcome, or what went wrong, and the seconds it took."""
    kind = REHEARSED if script.rehearsed else Device(name="lab0/0", kind="cpu", threads=1)
    request = Request(
        fleet=Fleet(devices=tuple(replace(kind, name=d) for d in script.devices)),
        rehearse=script.rehearsed,
        run_dir=str(folder),
        script=str(recipe),
        epochs=EPOCHS,
        plan=script.plan,
        faults=script.faults,
        snapshot_every=3,
        quiet=True,
    )
    over = threading.Event()
    trouble = threading.Thread(target=_make_trouble, args=(script, folder, over))
    watch = threading.Timer(LATE_S, _end_all)
    before = time.monotonic()
    trouble.start()
    watch.start()
    try:
        return launch(request), time.monotonic() - before
    except EvenerError as e:
        return f"{type(e).__name__}: {e}", time.monotonic() - before
    finally:
        watch.cancel()
        over.set()
        trouble.join()


def _make_trouble(script: Script, folder: Path, over: threading.Event) -> None:
    """Signals to the processes from outside, each at its moment."""
    for what, device, step, seconds in script.outside:
        while _recorded(folder) < step and not over.wait(0.002):
            pass
        if over.wait(seconds):
            return
        for process in multiprocessing.active_children():
            if process.name == device and process.pid:
                os.kill(process.pid, FROM_OUTSIDE[what])
                if what == "stop":
                    threading.Timer(2.5, _go_on, args=(process,)).start()


def _go_on(process) -> None:
    if process.is_alive() and process.pid:
        os.kill(process.pid, signal.SIGCONT)


def _recorded(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def _end_all() -> None:
    """A run that hangs ends as one in which every process was lost; each says where it was."""
    for process in multiprocessing.active_children():
        if process.pid:
            os.kill(process.pid, signal.SIGCONT)
            os.kill(process.pid, signal.SIGABRT)


def faults_of(script: Script, outcome: Outcome | str, folder: Path, took_s: float) -> list[str]:
    """What is wrong with how a run ended; empty where it is as the undisturbed one."""
    if isinstance(outcome, str):
        return [outcome]
    if took_s >= LATE_S:
        return [f"a process did not end by itself within {LATE_S:.0f} s"]
    wanted, losses = reference(script.optimizer, script.max_norm)
    tensors = load_file(folder / "model.safetensors")
    order = [f"{n}.{kind}" for n in ("0", "2", "3", "5", "6") for kind in ("weight", "bias")]
    got = torch.cat([tensors[n].flatten() for n in order])
    wrong = []
    error = float((got - wanted).norm() / wanted.norm())
    if not error <= BOUND:
        wrong.append(f"parameters are {error:.1e} from the undisturbed run's")
    by_step = {r.step: r for r in read_metrics(folder / "metrics.jsonl").records}
    if sorted(by_step) != list(range(STEPS)):
        wrong.append(f"steps {sorted(set(range(STEPS)) - set(by_step))} are in no record")
    far = [n for n, r in by_step.items() if r.loss is None or abs(r.loss - losses[n]) > 1e-9]
    if far:
        wrong.append(f"the loss of steps {far} is not the undisturbed run's")
    gone = [d for w, d, _, _ in script.outside if w in ("kill", "ask")]
    gone += [f.device for f in script.faults.faults if f.type == "leave"]
    for device in gone:
        if not any(device in sentence for sentence in outcome.decisions):
            wrong.append(f"nothing is said of {device}, which was lost")
    return wrong


def main() -> int:
    p = parser("Does every disturbed run end as the undisturbed one?")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--count", type=int, default=200, help="scripts to play")
    p.add_argument("--first", type=int, default=0, help="number of the first one")
    args = p.parse_args()
    count = 4 if args.quick else args.count
    os.environ["PYTHONFAULTHANDLER"] = "1"  # of the fork server, so of all that it starts
    met: Counter[str] = Counter()
    bad: dict[int, list[str]] = {}
    longest_s = 0.0
    with tempfile.TemporaryDirectory() as root:
        for number in range(args.first, args.first + count):
            script = draw(number, args.seed)
            folder = Path(folder_at(Path(root) / str(number)))
            recipe = Path(root) / f"soak_{script.optimizer}_{script.max_norm}.py"
            write_recipe(recipe, script.optimizer, script.max_norm)
            outcome, took_s = play(script, folder, recipe)
            longest_s = max(longest_s, took_s)
            wrong = faults_of(script, outcome, folder, took_s)
            met.update(
                [script.shape, *(f.type for f in script.faults.faults), *(o[0] for o in script.outside)]
            )
            told = [] if isinstance(outcome, str) else outcome.decisions
            met.update(
                steps_with_kept_samples=sum(" are kept (" in sentence for sentence in told),
                steps_taken_whole=sum(" is taken anew whole" in sentence for sentence in told),
            )
            if wrong:
                bad[number] = wrong
                say(f"WRONG {script}\n   " + "\n   ".join(wrong))
                if not isinstance(outcome, str):
                    say("   " + "\n   ".join(outcome.decisions))
            elif number % 20 == 19:
                say(f"{number + 1 - args.first} scripts, {len(bad)} wrong")
    bars = [Bar(name="scripts that did not end as the undisturbed run", value=float(len(bad)), at_most=0.0)]
    figures = {"scripts": count, "wrong": bad, "met": dict(met), "longest_s": longest_s, "seed": args.seed}
    return finish(figures, bars, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
