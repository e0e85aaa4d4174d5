"""What namespaces lack on a machine, and the words of a shaped link."""

import os
from pathlib import Path

import pytest

from evener.errors import EnvironmentBrokenError
from evener.rehearsal.namespaces import Namespaces, command, missing, tbf, veth
from tests.local.namespaces import needs_root


@pytest.mark.parametrize(
    ("system", "user", "tools", "lacks"),
    [
        ("linux", 0, ("ip", "tc"), ""),
        ("linux", 1000, ("ip", "tc"), "root"),
        ("linux", 0, ("ip",), "tc (iproute2)"),
        ("linux", 1000, (), "root, ip (iproute2), tc (iproute2)"),
        ("darwin", 0, ("ip", "tc"), "Linux"),
    ],
)
def test_what_is_missing_is_named(system: str, user: int, tools: tuple[str, ...], lacks: str) -> None:
    found = missing(system=system, user=lambda: user, which=lambda tool: tool if tool in tools else None)
    assert found == lacks


def test_a_burst_is_two_milliseconds_and_never_less_than_a_packet() -> None:
    assert tbf("a", "e1", 1e8).words[-7:] == (
        "tbf",
        "rate",
        "100000000bit",
        "burst",
        "25000",
        "limit",
        "1250000",
    )
    assert tbf("a", "e1", 8e3).words[-3] == "3200"


@needs_root
def test_namespaces_are_apart_from_this_machine_and_gone_when_closed() -> None:
    before = os.readlink("/proc/thread-self/ns/net")
    with Namespaces(["a", "b"]) as made:
        made.run(veth("a", "e0", "b", "p0"))
        made.run(command("b", "ip link show p0"))
        with pytest.raises(EnvironmentBrokenError, match="ip link show e0 failed"):
            made.run(command("b", "ip link show e0"))
        with made.inside("a"):
            assert os.readlink("/proc/thread-self/ns/net") not in (before, "")
            assert "e0" in Path("/proc/thread-self/net/dev").read_text(encoding="ascii")
        path = made.path("a")
        assert os.path.exists(path)
    assert os.readlink("/proc/thread-self/ns/net") == before
    assert not os.path.exists(path) or not os.readlink(path).startswith("net:")


@needs_root
def test_an_error_inside_brings_the_thread_back() -> None:
    before = os.readlink("/proc/thread-self/ns/net")
    with Namespaces(["a"]) as made, pytest.raises(KeyError), made.inside("a"):
        raise KeyError
    assert os.readlink("/proc/thread-self/ns/net") == before
