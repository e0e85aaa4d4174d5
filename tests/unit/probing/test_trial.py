"""Trying a peer over loopback: what is right, what lies, who is a stranger, and what does not answer."""

import socket
import threading
from contextlib import suppress

import pytest

from evener.probing.trial import PING_BYTES, PINGS, Waiter, look, rate, reach, steady

HERE = "127.0.0.1"


@pytest.fixture
def waiter():
    with Waiter("secret", host=HERE) as made:
        yield made


def test_a_peer_that_is_well(waiter):
    found = look(HERE, waiter.port, "secret", timeout_s=5)
    assert found.error == "" and 0 < found.latency_s < 1 and found.by == HERE
    found = rate(HERE, waiter.port, "secret", seconds=0.1, timeout_s=5)
    assert found.error == "" and found.bytes_per_s > 1e6


def test_a_stranger_is_told_nothing(waiter):
    assert "somebody else" in look(HERE, waiter.port, "another secret", timeout_s=5).error
    with socket.create_connection((HERE, waiter.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(100))
        stranger.settimeout(5)
        with suppress(ConnectionResetError):
            assert stranger.recv(100) == b""


def test_nobody_there():
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
    assert look(HERE, port, "secret", timeout_s=1).error == "connection refused"
    assert reach(HERE, port, come_s=0.1, silent_s=0.1) == "connection refused for 0 s"


def test_one_that_takes_the_call_and_says_nothing():
    with socket.create_server((HERE, 0)) as silent:
        port = silent.getsockname()[1]
        assert look(HERE, port, "secret", timeout_s=0.2).error == "no answer within 0.2 s"
        assert reach(HERE, port, come_s=1, silent_s=1) == ""


class Liar:
    """Stands between a dialler and a waiter and changes one byte of what the dialler sends."""

    def __init__(self, port, at):
        self._listener = socket.create_server((HERE, 0))
        self.port, self._to, self._at = self._listener.getsockname()[1], port, at
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        dialler, _ = self._listener.accept()
        there = socket.create_connection((HERE, self._to))
        threading.Thread(target=self._pass, args=(there, dialler, None), daemon=True).start()
        self._pass(dialler, there, self._at)

    def _pass(self, source, target, at):
        seen = 0
        try:
            while part := bytearray(source.recv(65536)):
                if at is not None and seen <= at < seen + len(part):
                    part[at - seen] ^= 1
                seen += len(part)
                target.sendall(part)
        except OSError:
            return  # one of the two hung up

    def close(self):
        self._listener.close()


HEAD = 44
BLOCK_AT = HEAD + PINGS * PING_BYTES


@pytest.mark.parametrize("at", [HEAD + 5, BLOCK_AT, BLOCK_AT + 30_000])
def test_one_changed_byte_is_noticed_by_a_look(waiter, at):
    liar = Liar(waiter.port, at)
    assert "data arrives changed" in look(HERE, liar.port, "secret", timeout_s=5).error
    liar.close()


@pytest.mark.parametrize("at", [HEAD, HEAD + 100_000, HEAD + 2**18 + 7])
def test_one_changed_byte_is_noticed_under_load(waiter, at):
    liar = Liar(waiter.port, at)
    found = rate(HERE, liar.port, "secret", seconds=0.2, timeout_s=5)
    assert "data arrives changed" in found.error
    liar.close()


def test_the_first_quarter_does_not_count():
    assert steady([(0.0, 0), (1.0, 1), (2.0, 9), (3.0, 17), (4.0, 25)]) == pytest.approx(8)
    assert steady([(0.0, 5)]) == 0.0


def test_a_closed_waiter_answers_nobody():
    with Waiter("secret", host=HERE) as waiter:
        port = waiter.port
    assert look(HERE, port, "secret", timeout_s=0.5).error
