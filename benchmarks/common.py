"""What the benchmarks share: processes that meet in a group, bars to clear, and the last line of JSON."""

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from evener.core.figures import Value
from evener.core.files import read
from evener.core.fleet import Fleet
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.report.results import RunReport
from evener.session.launching.launch import launch
from evener.session.request import Request

ROOT = Path(__file__).resolve().parent.parent
FLEETS = ROOT / "examples" / "fleets"
TEXT = ROOT / "examples" / "text.py"


class Bar(Value, frozen=True, kw_only=True):
    """A figure and the bar it must clear: at least or at most `bar`."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def passed(self) -> bool:
        """NaN passes nothing."""
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    def __str__(self) -> str:
        bounds = [f"at least {self.at_least:.4g}"] if self.at_least is not None else []
        bounds += [f"at most {self.at_most:.4g}"] if self.at_most is not None else []
        word = "pass" if self.passed else "MISSED"
        return f"{word:6}  {self.name} {self.value:.4g}, bar: {', '.join(bounds)}"


def parser(text: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    p = argparse.ArgumentParser(description=text)
    p.add_argument("--json", action="store_true", help="last line of output: one JSON object")
    p.add_argument("--quick", action="store_true", help="few steps: does it run, not how fast")
    return p


def say(text: str) -> None:
    """A line for people, on standard error."""
    print(text, file=sys.stderr, flush=True)


def finish(figures: dict[str, Any], bars: Sequence[Bar], *, as_json: bool) -> int:
    """Tell every bar, print the figures as the last line where asked; 1 when a bar was missed."""
    for bar in bars:
        say(str(bar))
    missed = [bar.name for bar in bars if not bar.passed]
    if as_json:
        shown = [msgspec.to_builtins(bar) | {"passed": bar.passed} for bar in bars]
        print(json.dumps(figures | {"bars": shown, "passed": not missed, "machine": machine()}), flush=True)
    return int(bool(missed))


def fleet_named(name: str) -> Fleet:
    """The fleet examples/fleets/`name`.json."""
    return read(FLEETS / f"{name}.json", Fleet)


class Run(Value, frozen=True, kw_only=True):
    """A run of `evener train`: its report, its plan, and the profile the plan was made from."""

    report: RunReport
    plan: Plan
    profile: Profile
    timings_hold: bool
    rehearsal: str


def train(
    fleet: Fleet, *, script: Path = TEXT, rehearse: bool = True, profile: Profile | None = None, **wishes: Any
) -> Run:
    """What `evener train` does with these wishes (see `Request`), without held-out loss; keeps no file.

    A `plan` among them comes with the profile it was made from.
    """
    with tempfile.TemporaryDirectory(prefix="evener-benchmark-") as folder:
        request = Request(
            script=str(script),
            fleet=fleet,
            rehearse=rehearse,
            profile=profile,
            run_dir=folder,
            evaluate=False,
            quiet=True,
            **wishes,
        )
        outcome = launch(request)
        used = profile or read(Path(folder) / "profile.json", Profile)
    assert outcome.report is not None, "a plan made from a profile carries a prediction"
    if not outcome.timings_hold:
        say(f"WARNING: {outcome.rehearsal}")
    return Run(
        report=outcome.report,
        plan=outcome.plan,
        profile=used,
        timings_hold=outcome.timings_hold,
        rehearsal=outcome.rehearsal,
    )


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": sys.version.split()[0],
    }


def run_processes(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 900.0) -> list[Any]:
    """`fn(rank, world_size, *args)` in processes of one thread that share a gloo group; results by rank.

    RuntimeError with the traceback of the first process that failed; no process is left behind.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
    processes, ends = [], []
    try:
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs, fn, rank, world_size, store.port, args), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            ends.append(mine)
        return _collect(ends, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for end in ends:
            end.close()


def _collect(ends: list[Connection], deadline_s: float) -> list[Any]:
    """All results, before anybody leaves: one that left early would look like a lost peer."""
    results: dict[int, Any] = {}
    while len(results) < len(ends):
        waiting = [end for rank, end in enumerate(ends) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            raise RuntimeError(f"{len(waiting)} of {len(ends)} processes did not finish in time")
        for end in ready:
            rank = ends.index(end)  # type: ignore[arg-type]
            try:
                ok, value = end.recv()  # type: ignore[union-attr]
            except EOFError:
                ok, value = False, "it died and said nothing"
            if not ok:
                raise RuntimeError(f"process {rank} failed: {value}")
            results[rank] = value
    return [results[rank] for rank in range(len(ends))]


def _work(
    end: Connection, fn: Callable[..., Any], rank: int, world_size: int, port: int, args: tuple
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=5)
        )
        end.send((True, fn(rank, world_size, *args)))
        with contextlib.suppress(EOFError):
            end.recv()  # until the parent ends us
    except Exception:
        end.send((False, traceback.format_exc()))
    os._exit(0)
