"""`evener checkpoints`: what a run has saved, whether it is good, and its weights as one ordinary file."""

from pathlib import Path
from typing import Annotated, Any

import typer

from evener.cli.options import AsJson, RunFolder


def checkpoints(
    run: RunFolder,
    export: Annotated[
        Path | None, typer.Option(help="Write the weights of the newest good one to this safetensors file.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Read every byte and compare checksums.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """List a run's checkpoints, newest first, and say which of them are good.

    RUN may be the folder of one checkpoint as well. The exit code is 1 where none is good. --export writes
    parameters and buffers under the model's own names, which plain PyTorch reads without evener.
    """
    from rich.console import Console
    from rich.table import Table

    from evener.cli.train import print_json
    from evener.session.checkpoints.saved import export_weights, listed

    found = listed(run, verify=verify)
    table = Table("checkpoint", "step", "samples", "MiB", "shards", "model", "state", box=None)
    for one in found:
        state = one.problem or ("good" if verify else "not verified")
        size = "" if one.num_bytes is None else f"{one.num_bytes / 2**20:.1f}"
        shown = [one.step, one.samples_seen, size, one.num_shards, one.model_id]
        table.add_row(one.name, *("" if x is None else str(x) for x in shown), state)
    Console(stderr=as_json).print(table if found else f"{run} has no checkpoint")
    result: dict[str, Any] = {"checkpoints": [one.as_json() for one in found]}
    if export is not None:
        source = export_weights(run, export)
        Console(stderr=as_json).print(f"weights of {source.name} written to {export}")
        result["exported"] = {"from": str(source), "to": str(export)}
    if as_json:
        print_json(result)
    if all(one.problem for one in found):
        raise typer.Exit(1)
