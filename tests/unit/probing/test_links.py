import os
import sys

import pytest

from evener.errors import EnvironmentBrokenError
from evener.probing.links import MESSAGE_BYTES, Pair, message_tasks


def pair_that_runs(code, **timeouts):
    return Pair((sys.executable, "-c", code), **timeouts)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_commands_and_answers():
    echo = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    what, num_bytes, calls = line.split()
    print(int(num_bytes) * (2 if what == "reduce" else 1) + int(calls) / 100, flush=True)
"""
    with pair_that_runs(echo) as pair:
        pair.wait_until_ready()
        assert pair.seconds("send", 64) == 64.12
        assert pair.seconds("reduce", 2**24) == 2**25 + 0.03
        tasks = message_tasks(pair, "send")
        assert tuple(tasks) == MESSAGE_BYTES
        assert tasks[4096].name == "send 4 KiB"
        assert tasks[4096].sample() == 4096.12
    assert not is_alive(pair.pid)


def test_a_pair_that_ends_says_why():
    with (
        pair_that_runs("raise OSError('no loopback')") as pair,
        pytest.raises(EnvironmentBrokenError, match=r"ended[\s\S]*OSError: no loopback[\s\S]*--no-links"),
    ):
        pair.wait_until_ready()
    assert not is_alive(pair.pid)


def test_a_silent_pair_is_given_up():
    silent = "import time; time.sleep(60)"
    with (
        pair_that_runs(silent, start_timeout_s=0.1) as pair,
        pytest.raises(EnvironmentBrokenError, match=r"did not answer within 0\.1 s"),
    ):
        pair.wait_until_ready()
    assert not is_alive(pair.pid)


def test_both_processes_of_a_real_pair_are_gone_afterwards():
    with Pair() as pair:
        pair.wait_until_ready()
        assert 1e-6 < pair.seconds("send", 64) < 1
        assert 1e-6 < pair.seconds("reduce", 65536) < 1
        group = pair.pid
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)
