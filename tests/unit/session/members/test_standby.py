"""Who may go on at a standby, and what it needs to know."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evener.core.fleet import Device, Fleet
from evener.core.membership import Electorate, Turn
from evener.session.meeting import Meeting, serve_store, store_at
from evener.session.members.door import Welcome
from evener.session.members.resettle import move
from evener.session.members.standby import Standby
from evener.session.pulse import Pulse
from evener.session.request import Request

NAMES = ("lab/a", "lab/b", "lab/c")


@pytest.fixture
def standby() -> Standby:
    fleet = Fleet(devices=(Device(name="lab/a", kind="cpu", threads=1),))
    welcome = Welcome(store_host="127.0.0.1", store_port=1, request=Request(fleet=fleet, run_dir="run"))
    return Standby("127.0.0.1", "token", Path("join-token"), welcome)


def member_of(standby: Standby | None, here: str = "lab/b", bound: tuple[str, ...] = ("lab/a",)) -> Any:
    store, port = serve_store("127.0.0.1")
    meeting = Meeting(store_at("127.0.0.1", port, timedelta(seconds=5)), -1, 2)
    meeting.put("tables", True)
    electorates = (Electorate(devices=NAMES, bound=bound),)
    pulse = Pulse(meeting.connect(), here)
    return SimpleNamespace(
        meeting=meeting, pulse=pulse, standby=standby, here=here, electorates=electorates, kept=store
    )


def turn_of(standbys: dict[str, str]) -> Turn:
    return Turn(fleet=None, plan=None, members=NAMES, standbys=standbys)  # type: ignore[arg-type]


def test_the_first_standby_that_answers_is_told_what_nobody_else_knows(standby: Standby) -> None:
    gone, port = serve_store("127.0.0.1")
    del gone
    member = member_of(standby)
    standby.remember(member.meeting)
    said = move(member, turn_of({"lab/c": f"127.0.0.1:{port}", "lab/b": standby.address}))
    standby.close()
    assert said == f"the job's store is lost; those who are left meet at {standby.address}, on lab/b"
    assert member.meeting.at == standby.address and member.meeting.get("tables", bool)
    member.pulse.look()
    assert member.pulse.alarm is None and member.meeting.has("pulse/lab/b")


def test_a_standby_that_is_lost_as_it_is_moved_to_is_passed_over(standby: Standby) -> None:
    member, other = member_of(standby), serve_store("127.0.0.1")
    moves: list[str] = []

    def move_pulse(store: Any, unborn_s: float) -> None:
        moves.append("")
        if len(moves) == 1:
            raise RuntimeError("Connection reset by peer")

    member.pulse = SimpleNamespace(is_over=False, move=move_pulse)
    said = move(member, turn_of({"lab/c": f"127.0.0.1:{other[1]}", "lab/b": standby.address}))
    standby.close()
    assert len(moves) == 2 and said.endswith(f"meet at {standby.address}, on lab/b")


def test_who_may_not_go_on_stays(standby: Standby) -> None:
    both = turn_of({"lab/b": standby.address, "lab/c": standby.address})
    assert move(member_of(None), both) == ""  # started with the store
    assert move(member_of(standby, "lab/a"), both) == ""
    assert move(member_of(standby), turn_of({"lab/b": standby.address})) == ""  # 1 of 3
    member = member_of(standby)
    member.pulse.is_over = True
    assert move(member, both) == "" and member.meeting.at == ""
