"""`evener report`: a run's folder as one HTML file that works offline."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from evener.cli.options import AsJson, RunFolder
from evener.core.files import write_bytes
from evener.core.words import printable
from evener.report.page.against import comparison
from evener.report.page.build import document
from evener.report.page.files import read_run
from evener.report.page.html import page


def report(
    run: RunFolder,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The HTML file (default: RUN/report.html)."),
    ] = None,
    compare: Annotated[Path | None, typer.Option(help="Folder of another run to lay beside it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run as one HTML page: plan, timeline, lost time, predicted beside measured, decisions, cost.

    The page needs no network and no other file, prints, and shows each number with its unit and its source.
    The folder may be anybody's: links in it are not followed, and what cannot be read is told on the page.
    """
    ours = read_run(run)
    shown = document(ours)
    beside = comparison(ours, read_run(compare)) if compare else None
    path = output or run / "report.html"
    html = page(shown, compared=beside).encode()
    write_bytes(path, html)
    notes = (*shown.notes, *(beside.notes if beside else ()))
    print(f"{path}: {len(html) / 2**20:.2f} MiB, opens in any browser", file=sys.stderr)
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    if as_json:
        stats = {s.key: s.value for s in shown.stats}
        print(
            json.dumps({"file": str(path), "bytes": len(html), "figures": stats, "notes": list(notes)}),
            flush=True,
        )
