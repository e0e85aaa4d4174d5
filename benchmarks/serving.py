"""What does it cost a run that its page is served and looked at?

python benchmarks/serving.py --json

Two processes of one thread train the text example, unpaced. Beside them a process serves the run's page and
another takes in every event. In short stretches of the same run, in the order off on, on off, …, both are
stopped (SIGSTOP) or go on, so that what slows the machine for longer than some seconds meets both alike.

    run      |— steps —|— steps —|— steps —|— steps —|
    server   |   off   |   on    |   on    |   off   |

A pair's ratio is that of the median step times of its two stretches; the control is the same of neighbours
that are off. The interval is that of nine in ten medians of pairs drawn anew (bootstrap).
"""

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common import Bar, finish, parser, say
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.report.metrics import read_metrics
from evener.serving.server import LiveServer
from evener.session.launching.launch import launch
from evener.session.request import Request

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("(root)", "embed", "embed_before", "blocks.0", "blocks.1", "norm", "head")
NAMES = ("here/a", "here/b")
SAMPLES = 24
EDGE = 2  # steps at the beginning of a stretch that do not count
WARM_UP = 40
ORDER = (False, True, True, False, False, False)  # two pairs and a control
TICKS = os.sysconf("SC_CLK_TCK")


def serve(folder: str, told: Connection) -> None:
    """Serve the run in `folder` until this process is ended; tells its address."""
    with LiveServer(folder, "127.0.0.1:0", lambda said: None) as server:
        told.send(server.url)
        signal.pause()


def onlook(url: str) -> None:
    """Take in every event of the page at `url`, as a browser would."""
    with urllib.request.urlopen(url + "events", timeout=3600) as events:
        while events.read1(1 << 20):
            pass


class Stretches(threading.Thread):
    """Lets the server and its onlooker go on or stops them, so many steps each.

    `found` are (is on, first step, last step); `cpu` is the part of a core that the two used, by name.
    """

    def __init__(self, folder: Path, length: int, rounds: int) -> None:
        super().__init__(daemon=True)
        self.folder, self.length, self.order = folder, length, ORDER * rounds
        self.found: list[tuple[bool, int, int]] = []
        self.cpu: dict[str, float] = {}

    def run(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._wait_for(1)  # there is a plan, and so a page
        here, there = context.Pipe()
        server = context.Process(target=serve, args=(str(self.folder), there), daemon=True)
        server.start()
        onlooker = context.Process(target=onlook, args=(here.recv(),), daemon=True)
        onlooker.start()
        self._wait_for(WARM_UP)
        at, on_s = self._steps(), 0.0
        used = {"server": -_cpu_s(server.pid), "onlooker": -_cpu_s(onlooker.pid)}
        for on in self.order:
            began = time.monotonic()
            for process in (server, onlooker):
                os.kill(process.pid or 0, signal.SIGCONT if on else signal.SIGSTOP)
            self.found.append((on, at + EDGE, at + self.length))
            at += self.length
            self._wait_for(at)
            on_s += on * (time.monotonic() - began)
        used["server"] += _cpu_s(server.pid)
        used["onlooker"] += _cpu_s(onlooker.pid)
        self.cpu = {name: seconds / on_s for name, seconds in used.items()}
        for process in (onlooker, server):
            process.kill()
            process.join()

    def _steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def _wait_for(self, steps: int) -> None:
        while self._steps() < steps:
            time.sleep(0.1)


def _cpu_s(pid: int | None) -> float:
    """Seconds of processor time that the process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(length: int, rounds: int) -> dict[str, Any]:
    """Ratios of the pairs and of the controls, the step time, and the processor time of the onlookers."""
    stage = Stage(layers=LAYERS, shares=(Share(devices=(NAMES[0],), samples=SAMPLES),))
    other = Stage(layers=LAYERS, shares=(Share(devices=(NAMES[1],), samples=SAMPLES),))
    pipelines = tuple(Pipeline(samples=SAMPLES, micro_batch=SAMPLES, stages=(s,)) for s in (stage, other))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stretches = Stretches(folder, length, rounds)
        request = Request(
            script=str(ROOT / "examples" / "text.py"),
            fleet=Fleet(devices=tuple(Device(name=n, kind="CPU", threads=1) for n in NAMES)),
            plan=Plan(global_batch=2 * SAMPLES, pipelines=pipelines),
            global_batch=2 * SAMPLES,
            run_dir=name,
            steps=WARM_UP + rounds * len(ORDER) * length + 400,  # the rest: the server takes a while to start
            evaluate=False,
            adapt=False,
            quiet=True,
        )
        stretches.start()
        launch(request)
        stretches.join(30)
        seconds = [r.step_s for r in read_metrics(folder / "metrics.jsonl").records]
    found = [(on, median(seconds[first:last])) for on, first, last in stretches.found]
    pairs = list(zip(found[::2], found[1::2], strict=True))
    return {
        "pairs": [b / a if on_b else a / b for (on_a, a), (on_b, b) in pairs if on_a != on_b],
        "controls": [b / a for (on_a, a), (on_b, b) in pairs if on_a == on_b],
        "step_s": median(seconds[WARM_UP:]),
        "core": stretches.cpu,
    }


def interval(ratios: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Between which nine in ten medians lie of as many ratios drawn anew from `ratios`."""
    draw = random.Random(seed)
    drawn = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return drawn[50], drawn[949]


def main() -> int:
    options = parser(__doc__).parse_args()
    found = measure(length=10, rounds=1) if options.quick else measure(length=40, rounds=40)
    cost, control = median(found["pairs"]) - 1, median(found["controls"]) - 1
    low, high = interval(found["pairs"])
    say(
        f"step {1e3 * found['step_s']:.1f} ms, {len(found['pairs'])} pairs, {len(found['controls'])} controls"
    )
    say(f"served and looked at: {cost:+.2%} of a step ({low - 1:+.2%} to {high - 1:+.2%})")
    say(f"control: {control:+.2%}")
    say(", ".join(f"the {name} uses {part:.2%} of a core" for name, part in found["core"].items()))
    bars = [] if options.quick else [Bar(name="serving, of a step", value=cost, at_most=0.01)]
    figures = found | {"cost": cost, "control": control, "interval": (low - 1, high - 1)}
    return finish(figures, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
