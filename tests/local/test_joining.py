"""Hosts that make one fleet over loopback: each pair measured, strangers refused, absentees named."""

import socket
import threading
from contextlib import suppress

import pytest

from evener.core.addresses import host_and_port
from evener.core.figures import line
from evener.core.fleet import Device, Fleet, Link
from evener.errors import EnvironmentBrokenError
from evener.probing import joining


def fleet(host: str) -> Fleet:
    return Fleet(
        devices=(Device(name=f"{host}/cpu", kind="CPU"),),
        links=(Link(a=host, b=host, curve=line(1e-5, 1e10)),),
    )


class Gathering:
    """`gather` in a thread of its own, at a free port of the loopback."""

    def __init__(self, num_hosts: int, token: str = "right", come_s: float = 30.0) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.said: list[str] = []
        self.result: Fleet | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(num_hosts, token, come_s), daemon=True)
        self._thread.start()

    def _run(self, num_hosts: int, token: str, come_s: float) -> None:
        try:
            self.result = joining.gather(
                fleet("a"), num_hosts, self.listener, token=token, come_s=come_s, say=self.said.append
            )
        except Exception as e:
            self.error = e

    def end(self) -> Fleet | None:
        self._thread.join(40)
        self.listener.close()
        return self.result


@pytest.fixture(autouse=True)
def short(monkeypatch) -> None:
    monkeypatch.setattr(joining, "RATE_S", 0.1)
    monkeypatch.setattr(joining, "ROUNDS", 2)


def silent(text: str) -> None:
    """Nobody listens."""


def test_three_hosts_know_all_links_between_them() -> None:
    gathering = Gathering(3)
    found: dict[str, Fleet] = {}

    def come(name: str) -> None:
        found[name] = joining.join(fleet(name), gathering.address, token="right", come_s=30, say=silent)

    others = [threading.Thread(target=come, args=(n,)) for n in ("b", "c")]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join(40)
    merged = gathering.end()
    assert merged is not None
    assert found == {"b": merged, "c": merged}
    assert {d.host for d in merged.devices} == {"a", "b", "c"}
    between = {frozenset((x.a, x.b)): x.curve for x in merged.links if x.a != x.b}
    assert set(between) == {frozenset("ab"), frozenset("ac"), frozenset("bc")}
    for curve in between.values():
        assert curve.source == "measured" and curve.spread >= 0.05
        assert 0 < curve.seconds(64) < 0.05
        assert curve.seconds(1e8) < 10  # loopback moves more than 10 MB/s
    assert "unknown" not in merged.note


@pytest.mark.parametrize(
    ("host", "token", "said"),
    [("b", "wrong", "the token is wrong"), ("a", "right", "a host a is here already")],
)
def test_who_has_no_right_to_come_is_told_and_the_gathering_goes_on(host, token, said) -> None:
    gathering = Gathering(2)
    with pytest.raises(EnvironmentBrokenError, match=said):
        joining.join(fleet(host), gathering.address, token=token, come_s=10, say=silent)
    joining.join(fleet("b"), gathering.address, token="right", come_s=30, say=silent)
    assert gathering.end() is not None
    assert any(said in line for line in gathering.said)


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, (5).to_bytes(8, "little") + b"[1,2]", b""]
)
def test_strangers_are_hung_up_on(words: bytes) -> None:
    gathering = Gathering(2)
    host, port = host_and_port(gathering.address)
    # being reset is being hung up on too
    with suppress(OSError), socket.create_connection((host, port), 10) as stranger:
        stranger.settimeout(20)
        stranger.sendall(words)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(10) == b""
    joining.join(fleet("b"), gathering.address, token="right", come_s=30, say=silent)
    assert gathering.end() is not None
    assert "no host of evener" in gathering.said[0]


def test_hosts_that_do_not_come_are_counted() -> None:
    gathering = Gathering(3, come_s=0.2)
    assert gathering.end() is None
    assert "1 of 3 hosts came within 0.2 s" in str(gathering.error)


def test_nobody_gathers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(EnvironmentBrokenError, match="nobody gathers"):
        joining.join(fleet("b"), f"127.0.0.1:{port}", token="x", knock_s=0.3, say=silent)


def test_who_comes_too_early_knocks_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    said: list[str] = []
    found: list[Fleet] = []

    def come() -> None:
        found.append(joining.join(fleet("b"), f"127.0.0.1:{port}", token="x", come_s=30, say=said.append))

    early = threading.Thread(target=come, daemon=True)
    early.start()
    while not said:
        early.join(0.01)
    with socket.create_server(("127.0.0.1", port)) as listener:
        merged = joining.gather(fleet("a"), 2, listener, token="x", come_s=30, say=silent)
    early.join(30)
    assert found == [merged] and "yet" in said[0]


def test_a_curve_follows_from_latencies_and_rates() -> None:
    curve = joining.link_curve([1e-4, 1e-4, 1.1e-4], [1e8, 1e8, 1.2e8])
    assert curve.seconds(1e6) == pytest.approx(0.0101)
    assert curve.spread == pytest.approx(0.2)
