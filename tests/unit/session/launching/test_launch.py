"""What is said of a process that was ended from outside."""

import os
import signal
import subprocess
from dataclasses import dataclass

import psutil
import pytest

from evener.core.fleet import Device, Fleet
from evener.errors import EnvironmentBrokenError, PeerLostError
from evener.session.checkpoints.checkpointing import ANSWERED, ANSWERS, ASKED
from evener.session.checkpoints.save_rule import Keep, rule_of
from evener.session.launching import launch, server
from evener.session.launching.launch import _again, _why
from evener.session.request import Request

ONE = Fleet(devices=(Device(name="lab/a", kind="cpu"),))


@dataclass
class Ended:
    """A process that ended."""

    exitcode: int
    name: str = "lab/a"
    pid: int = 7


class Silent:
    """A store in which nobody told anything."""

    def check(self, keys: list[str]) -> bool:
        return False


class Told:
    """A store in which a few words stand."""

    def __init__(self, *words: str) -> None:
        self.words = {*words}

    def check(self, keys: list[str]) -> bool:
        return self.words.issuperset(keys)

    def set(self, key: str, value: str) -> None:
        self.words.add(key)


class Stuck:
    """A process that is seen to live a few times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def is_alive(self) -> bool:
        self.times -= 1
        return self.times >= 0


class Watching:
    def look(self, processes: list[Stuck]) -> list[str]:
        return ["no step has ended for 30 s"] if processes[0].times == 1 else []


def test_who_waits_for_one_more_checkpoint_is_told_when_nothing_moves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "ASK_S", 0.0)
    store, watching = Told(ANSWERS), Watching()
    launch._save_first(store, [Stuck(3)], watching)  # type: ignore[arg-type]
    assert store.words == {ANSWERS, ASKED}
    assert capsys.readouterr().err.count("no step has ended for 30 s") == 1
    saved, nobody_looks = Told(ANSWERS, ANSWERED), Told()
    launch._save_first(saved, [Stuck(9)], watching)  # type: ignore[arg-type]
    launch._save_first(nobody_looks, [Stuck(9)], watching)  # type: ignore[arg-type]
    assert saved.words == {ANSWERS, ANSWERED, ASKED} and not nobody_looks.words


@pytest.mark.parametrize(
    ("code", "said", "other"),
    [
        (-signal.SIGKILL, "out of memory", "manages the host"),
        (-signal.SIGTERM, "manages the host", "out of memory"),
    ],
)
@pytest.mark.parametrize("saved", [True, False])
def test_the_remedy_is_of_the_signal_and_names_how_to_go_on(code: int, said: str, other: str, saved: bool):
    rule = rule_of("5", Keep(last=3, every=0)) if saved else None
    request = Request(fleet=ONE, run_dir="runs/mine", checkpoint=rule)
    lost = _why(Ended(code), Silent(), patient=False, again=_again(request))  # type: ignore[arg-type]
    assert isinstance(lost, PeerLostError)
    assert said in lost.remedy and other not in lost.remedy
    assert ("--run-dir runs/mine --resume latest goes on" in lost.remedy) is saved
    assert ("with --checkpoint-every" in lost.remedy) is not saved


def test_a_job_whose_fork_server_was_ended_loses_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """All devices seemed to end with code 255, one after the other, and wished to join again."""
    monkeypatch.setattr(launch, "ended_server", lambda: 4711)
    with pytest.raises(EnvironmentBrokenError, match=r"no device was lost\n.*process id 4711\n.*--resume"):
        launch._check_server(launch.UNSEEN, "--resume latest")
    launch._check_server(1, "")
    monkeypatch.setattr(launch, "DYING_S", 0.0)
    monkeypatch.setattr(launch, "ended_server", lambda: None)
    launch._check_server(launch.UNSEEN, "")


def test_no_process_is_left_behind_that_only_the_server_could_have_waited_for() -> None:
    with subprocess.Popen(["sleep", "60"]) as lives, subprocess.Popen(["sleep", "0"]) as ended:
        seen = [psutil.Process(lives.pid), psutil.Process(ended.pid)]
        ended.wait()
        launch._end_left(seen)
        assert not any(process.is_running() for process in seen)


def test_a_server_that_is_no_more_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        monkeypatch.setattr(server.forkserver._forkserver, "_forkserver_pid", process.pid)
        assert server.ended_server() is None
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert server.ended_server() == process.pid  # not asked for its code yet
        process.wait()
        assert server.ended_server() == process.pid
    monkeypatch.setattr(server.forkserver._forkserver, "_forkserver_pid", None)
    assert server.ended_server() is None
