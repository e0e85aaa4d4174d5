"""Ctrl-C in the middle of an import: packages swallow it, or are broken by it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evener.cli.interrupts import TERMINATED, UNREAD, orderly_interrupts, orderly_sigterm

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


PRINTS = """
import sys
from rich.console import Console
from evener.cli import main as command
def load(verb):
    def run():
        how = sys.argv[1]
        if how == "rich":
            Console().print("word\\n" * 5_000)
        elif how == "error":
            raise command.UsageError("x" * 100_000)
        elif how == "peer":
            raise BrokenPipeError(32, "a peer is gone")
        else:
            print("x" * 100_000 if how == "print" else "x")
    app = command.typer.Typer()
    app.command(verb)(run)
    return command.typer.main.get_command(app)
command.load = load
command.main(["plan"])
"""


@pytest.mark.parametrize("how", ["print", "at the end", "rich", "error"])
def test_a_command_that_nobody_reads_ends_without_a_word(how: str) -> None:
    """`evener plan … | head` was exit code 1, `evener simulate … | head` a traceback."""
    reads, writes = os.pipe()
    os.close(reads)
    script = [sys.executable, "-c", PRINTS, how]
    other = subprocess.STDOUT if how == "error" else subprocess.PIPE
    done = subprocess.run(script, stdout=writes, stderr=other, text=True, timeout=60)
    os.close(writes)
    assert (done.returncode, done.stderr or "") == (UNREAD, "")


def test_a_peer_that_is_gone_is_another_matter() -> None:
    """The fork server killed while a process was started: exit code 141 and not a word, by typer."""
    done = subprocess.run([sys.executable, "-c", PRINTS, "peer"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "has ended: BrokenPipeError: [Errno 32] a peer is gone" in done.stderr
