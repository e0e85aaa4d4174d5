"""Ctrl-C in the middle of an import: packages swallow it, or are broken by it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evener.cli.interrupts import TERMINATED, orderly_interrupts, orderly_sigterm

SWALLOWS = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except BaseException:
    pass
"""


def test_an_interrupt_while_the_command_is_loaded_ends_it_at_once(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(SWALLOWS)  # the first package that the command loads
    done = subprocess.run(
        [sys.executable, "-c", "from evener.cli.start import main; main()"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_elsewhere_an_interrupt_is_as_ever_and_the_handlers_go_again() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), orderly_interrupts():
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended, orderly_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == TERMINATED
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with orderly_interrupts():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
