"""`evener watch`: a run while it runs, or after, from its folder alone."""

import json
import sys
import time

from rich.console import Console

from evener.cli.options import SERVED_AT, AsJson, ListenAt, LogTo, RunFolder, Serve
from evener.core.claim import is_claimed
from evener.core.tell import tell
from evener.core.words import printable
from evener.errors import FileError
from evener.report.live import LiveView
from evener.report.page.files import RunFiles
from evener.report.page.losses import report_of
from evener.report.page.stats import headline_stats
from evener.report.tables import clock_time
from evener.serving.follow import Follower
from evener.serving.watching import watching

LOOK_S = 0.5
QUIET_S = 30.0


def watch(
    run: RunFolder,
    serve: Serve = False,
    listen: ListenAt = None,
    log_to: LogTo = None,
    as_json: AsJson = False,
) -> None:
    """Show a run in the terminal while it goes on, until it has ended; end early with Ctrl-C.

    With --serve the page of evener report is shown live, with Prometheus metrics at /metrics. Reads the run's
    folder only, so that the run does not know that it is watched. The folder may be anybody's.
    """
    follower = Follower(run)
    with watching(run, listen=listen or (SERVED_AT if serve else None), log_to=log_to or ()):
        known = _follow(follower)
    for problem in known.problems:
        print(f"note: {printable(problem)}", file=sys.stderr)
    if as_json:
        figures = {s.key: s.value for s in headline_stats(known, report_of(known))}
        print(json.dumps({"run": known.name, "steps": follower.seen, "figures": figures}), flush=True)


def _follow(follower: Follower) -> RunFiles:
    """Show every step until the report is there; say it when nothing is added for long."""
    console, shown, view = Console(file=sys.stderr), 0, None
    since, patience = time.monotonic(), QUIET_S
    try:
        while True:
            changed = follower.look()
            run = follower.run
            if run is not None and run.records:
                if view is None:
                    view = _open_view(run, console)
                for record in follower.records[len(follower.records) - (follower.seen - shown) :]:
                    view.update(record)
                shown = follower.seen
            if run is not None and run.ending is not None:
                return run
            if not changed and _has_ended(follower) and not follower.look():
                if run is None:
                    raise FileError(
                        f"the run in {follower.folder.path} has ended, and had no plan",
                        remedy="why is in the terminal where it was started",
                    )
                tell("the run has ended without a report: it was stopped, or it failed")
                return run
            now = time.monotonic()
            if changed:
                since, patience = now, QUIET_S
            elif now - since > patience:
                told = "no plan" if run is None else "no new step"
                tell(f"{told} for {clock_time(now - since)}")
                patience *= 2
            time.sleep(LOOK_S)
    finally:
        if view is not None:
            view.__exit__(None, None, None)


def _has_ended(follower: Follower) -> bool:
    """Whether the process that had claimed the folder is gone; not known of runs under torchrun."""
    path = follower.folder.path
    return is_claimed(path) is False or not path.is_dir()


def _open_view(run: RunFiles, console: Console) -> LiveView:
    total = run.info.total_steps if run.info else run.records[-1].step + 1
    return LiveView(run.plan, total, time.monotonic, console).__enter__()
