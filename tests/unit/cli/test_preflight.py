"""What `evener preflight` refuses."""

import socket

import pytest

from evener.cli.preflight import preflight
from evener.errors import EnvironmentBrokenError, UsageError


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"meet": "lab1:29400"},
        {"meet": "lab1:29400", "processes": 2},
        {"meet": "lab1:29400", "processes": 2, "number": 2},
        {"meet": "lab1", "processes": 2, "number": 0},
        {"meet": "lab1:99999", "processes": 2, "number": 0},
    ],
)
def test_who_does_not_say_where_and_who(wrong, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError):
        preflight(**wrong)


@pytest.mark.parametrize("number", [0, 1])
def test_a_meeting_place_whose_name_nobody_knows(number, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)

    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(EnvironmentBrokenError, match="lab9:29400: lab9 is no name that this host knows"):
        preflight(meet="lab9:29400", processes=2, number=number, wait=1.0)


def test_a_meeting_place_where_nobody_is(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(EnvironmentBrokenError, match=r"127\.0\.0\.1:1: connection refused"):
        preflight(meet="127.0.0.1:1", processes=2, number=1, wait=1.0)
