import sys
import time

import pytest

from evener.probing.asking import MOST_BYTES, ask

PYTHON = (sys.executable, "-S", "-c")


def test_what_a_program_writes_is_kept() -> None:
    answer = ask((*PYTHON, "print('x' * 5)"), 20)
    assert (answer.text, answer.failure) == ("xxxxx\n", "")


@pytest.mark.parametrize(
    ("code", "text", "failure"),
    [
        ("print(1); raise SystemExit(3)", "1\n", "1"),
        ("import sys; sys.exit('no device')", "", "no device"),
        ("print(1, flush=True); import os; os.kill(os.getpid(), 11)", "1\n", "was ended by signal SIGSEGV"),
    ],
)
def test_a_failure_is_told_and_what_came_before_it_is_kept(code, text, failure) -> None:
    answer = ask((*PYTHON, code), 20)
    assert (answer.text, answer.failure) == (text, failure)


def test_a_missing_program_is_a_failure() -> None:
    assert "No such file" in ask(("no-such-program-here",), 5).failure


def test_a_program_that_hangs_is_ended_with_its_children() -> None:
    code = (
        "import subprocess, sys, time; print('up', flush=True);"
        "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    )
    begin = time.monotonic()
    answer = ask((*PYTHON, code), 3.0)
    assert answer.text == "up\n" and answer.failure == "did not answer within 3 s"
    assert time.monotonic() - begin < 30


def test_a_flood_is_cut() -> None:
    answer = ask((*PYTHON, f"print('x' * {3 * MOST_BYTES})"), 20)
    assert len(answer.text) == MOST_BYTES and answer.failure == ""
