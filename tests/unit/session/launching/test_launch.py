"""What is said of a process that was ended from outside."""

import signal
from dataclasses import dataclass

import pytest

from evener.core.fleet import Device, Fleet
from evener.errors import PeerLostError
from evener.session.checkpoints.save_rule import Keep, rule_of
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
    request = Request(fleet=ONE, run_dir=".", checkpoint=rule)
    lost = _why(Ended(code), Silent(), patient=False, again=_again(request))  # type: ignore[arg-type]
    assert isinstance(lost, PeerLostError)
    assert said in lost.remedy and other not in lost.remedy
    assert ("--resume latest goes on" in lost.remedy) is saved
    assert ("with --checkpoint-every" in lost.remedy) is not saved
