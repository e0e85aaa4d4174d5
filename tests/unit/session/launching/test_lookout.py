"""A stopped process is named; so is who idles when no step ends for long. A run once was silent for 125 s."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil

from evener.session.launching.lookout import QUIET_S, Lookout


@dataclass
class Fake:
    """A process as multiprocessing and psutil show it."""

    name: str
    pid: int
    busy_s: float = 0.0
    state: str = psutil.STATUS_RUNNING

    def status(self) -> str:
        return self.state

    def cpu_times(self) -> SimpleNamespace:
        return SimpleNamespace(user=self.busy_s, system=0.0)


def lookout(metrics: Path, processes: list[Fake], now: list[float]) -> Lookout:
    by_pid = {p.pid: p for p in processes}
    return Lookout(metrics, clock=lambda: now[0], process_of=by_pid.__getitem__)


def test_a_stopped_process_is_named_once_with_what_would_work(tmp_path: Path) -> None:
    a, b = Fake("lab/a", 11), Fake("lab/b", 12, state=psutil.STATUS_STOPPED)
    looking = lookout(tmp_path / "metrics.jsonl", [a, b], [0.0])
    assert looking.look([a, b]) == ["the process of lab/b is stopped; it goes on with kill -CONT 12"]
    assert looking.look([a, b]) == []
    b.state = psutil.STATUS_RUNNING
    looking.look([a, b])
    b.state = psutil.STATUS_STOPPED
    assert len(looking.look([a, b])) == 1


def test_silence_is_told_with_who_is_busy_and_less_and_less_often(tmp_path: Path) -> None:
    a, b = Fake("lab/a", 11), Fake("lab/b", 12)
    now, metrics = [0.0], tmp_path / "metrics.jsonl"
    looking = lookout(metrics, [a, b], now)
    assert looking.look([a, b]) == []
    now[0], a.busy_s = QUIET_S, QUIET_S / 2
    assert looking.look([a, b]) == [
        "no step has ended for 30 s; busy on a processor since then: lab/a 50%, lab/b 0%"
    ]
    now[0] = 1.5 * QUIET_S
    assert looking.look([a, b]) == []
    now[0] = 2 * QUIET_S
    assert len(looking.look([a, b])) == 1
    metrics.write_text("a step")
    now[0] = 3 * QUIET_S
    assert looking.look([a, b]) == []
