"""What does it cost a run that its page is served and looked at?

python benchmarks/serving.py --json

Two processes of one thread train the text example, unpaced. In pairs of stretches of the same run, in the
order off on, on off, …, the live view is off, or on with a page that takes in every event. A pair's ratio is
that of the median step times of its two stretches; the control is that of the two halves of one that is off.
"""

import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common import Bar, finish, parser, say
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.report.metrics import read_metrics
from evener.serving.server import LiveServer
from evener.session.launch import launch
from evener.session.request import Request

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("(root)", "embed", "embed_before", "blocks.0", "blocks.1", "norm", "head")
NAMES = ("here/a", "here/b")
SAMPLES = 24
EDGE = 20  # steps at both ends of a stretch that do not count: the view is opened and closed there
WARM_UP = 30


class Stretches(threading.Thread):
    """Turns the view on and off after so many steps each; `found` are (is on, first step, last step).

    `cpu` is how much of a core this process used meanwhile, by whether the view was on.
    """

    def __init__(self, folder: Path, length: int, pairs: int) -> None:
        super().__init__(daemon=True)
        self.folder, self.length = folder, length
        self.order = [on for n in range(pairs) for on in ((False, True) if n % 2 == 0 else (True, False))]
        self.found: list[tuple[bool, int, int]] = []
        self.cpu: dict[bool, list[float]] = {False: [], True: []}
        self.events = 0

    def run(self) -> None:
        self._wait_for(WARM_UP)
        at = WARM_UP
        for on in self.order:
            with ExitStack() as stack:
                began, used = time.monotonic(), time.process_time()
                if on:
                    self._look(stack.enter_context(LiveServer(self.folder, "127.0.0.1:0", lambda said: None)))
                self._wait_for(at + self.length + EDGE)
                self.cpu[on].append((time.process_time() - used) / (time.monotonic() - began))
            self.found.append((on, at + EDGE, at + EDGE + self.length))
            at += self.length + 2 * EDGE  # the server's end belongs to neither
            self._wait_for(at)

    def _look(self, server: LiveServer) -> None:
        def take_in() -> None:
            with urllib.request.urlopen(server.url + "events", timeout=60) as events:
                for line in events:
                    self.events += line.startswith(b"event: parts")

        urllib.request.urlopen(server.url, timeout=60).read()
        threading.Thread(target=take_in, daemon=True).start()

    def _wait_for(self, steps: int) -> None:
        path = self.folder / "metrics.jsonl"
        while not path.exists() or path.read_bytes().count(b"\n") < steps:
            time.sleep(0.2)


def measure(length: int, pairs: int) -> dict[str, Any]:
    """Ratios of the pairs and of the controls, and the step time."""
    stage = Stage(layers=LAYERS, shares=(Share(devices=(NAMES[0],), samples=SAMPLES),))
    other = Stage(layers=LAYERS, shares=(Share(devices=(NAMES[1],), samples=SAMPLES),))
    pipelines = tuple(Pipeline(samples=SAMPLES, micro_batch=SAMPLES, stages=(s,)) for s in (stage, other))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stretches = Stretches(folder, length, pairs)
        request = Request(
            script=str(ROOT / "examples" / "text.py"),
            fleet=Fleet(devices=tuple(Device(name=n, kind="CPU", threads=1) for n in NAMES)),
            plan=Plan(global_batch=2 * SAMPLES, pipelines=pipelines),
            global_batch=2 * SAMPLES,
            run_dir=name,
            steps=WARM_UP + 2 * pairs * (length + 2 * EDGE) + 5,
            evaluate=False,
            adapt=False,
            quiet=True,
        )
        stretches.start()
        launch(request)
        stretches.join(30)
        seconds = [r.step_s for r in read_metrics(folder / "metrics.jsonl").records]
    found = [(on, seconds[first:last]) for on, first, last in stretches.found]
    return {
        "pairs": ratios(found),
        "controls": [median(s[len(s) // 2 :]) / median(s[: len(s) // 2]) for on, s in found if not on],
        "step_s": median(seconds[WARM_UP:]),
        "events": stretches.events,
        "cpu": median(stretches.cpu[True]) - median(stretches.cpu[False]),
    }


def ratios(found: list[tuple[bool, list[float]]]) -> list[float]:
    """Median step with the view over that without, pair by pair."""
    pairs = zip(found[::2], found[1::2], strict=True)
    return [median(b if on_b else a) / median(a if on_b else b) for (_, a), (on_b, b) in pairs]


def main() -> int:
    options = parser(__doc__).parse_args()
    found = measure(length=12, pairs=1) if options.quick else measure(length=100, pairs=14)
    cost, control = median(found["pairs"]) - 1, median(found["controls"]) - 1
    say(f"step {1e3 * found['step_s']:.1f} ms; {found['events']} events; pairs {found['pairs']}")
    say(f"served and looked at: {100 * cost:+.2f} % of a step; control {100 * control:+.2f} %")
    say(f"the server and its onlooker use {100 * found['cpu']:.2f} % of a core")
    bars = [] if options.quick else [Bar(name="serving, of a step", value=cost, at_most=0.01)]
    return finish(found | {"cost": cost, "control": control}, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
