"""The fork server that the processes of a job come from: it begins early and ends at once. No torch in here.

evener train ── start_early ──► fork server: loads torch and its compiler, then forks a process a device
     └─ loads torch itself meanwhile
"""

import atexit
import multiprocessing as mp
import os
import signal
import threading
from multiprocessing import forkserver
from pathlib import Path

import psutil

# torch loads its compiler at the first step of an optimiser: once in the server, not once a process.
PRELOADED = ["evener.session.worker", "torch._dynamo"]


def start_early(script: Path | None) -> None:
    """Start the server for a command that is about to load torch itself and then to run `script`.

    Side by side the two loads, 2.6 s and 4.1 s of a core's time, take no longer than the second. Nothing
    happens where there is no such file, or where torchrun has started the processes.
    """
    if script is not None and script.is_file() and "RANK" not in os.environ:
        start_server()


def start_server() -> None:
    """The fork server, for which Ctrl-C and SIGTERM are nothing from its first moment on.

    It ends with this process: a signal to all of a job leaves it there for a last checkpoint. What it forks
    ignores SIGTERM too, until told otherwise. Returns at once; a server that is there stays.
    """
    # Idle OpenMP threads spin on cores that other processes need: with 1 + 2 threads on 2 cores a step took
    # three times as long. Read when torch is loaded, that is by the fork server; a value of the user's stays.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A lost device is told in a sentence; torch would add forty lines of its own C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    mp.get_context("forkserver").set_forkserver_preload(PRELOADED)
    if threading.current_thread() is not threading.main_thread():
        return  # it is then started with the first process
    # What is ignored stays so in a new program.
    before = {s: h for s in (signal.SIGINT, signal.SIGTERM) if (h := signal.getsignal(s)) is not None}
    for number in before:
        signal.signal(number, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    atexit.unregister(end_server)
    atexit.register(end_server)


def ended_server() -> int | None:
    """The process id of the server where it was ended from outside; None where it runs or there is none."""
    number = getattr(forkserver._forkserver, "_forkserver_pid", None)  # type: ignore[attr-defined]
    if number is None:
        return None
    try:
        return number if psutil.Process(number).status() == psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return number


def end_server() -> None:
    """End the server of this process, if there is one.

    Left alone it notices, once it has loaded, that nobody needs it, and unloads torch for most of a second;
    who reads the command's output to its end (`| tee`) waits for that.
    """
    number = getattr(forkserver._forkserver, "_forkserver_pid", None)  # type: ignore[attr-defined]
    if number is not None:
        os.kill(number, signal.SIGKILL)
