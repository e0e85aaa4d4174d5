"""`evener checkpoints`: what a run has saved, whether it is good, and its state in the form of others."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from evener.cli.options import AsJson, RunFolder
from evener.core.words import counted, in_bytes


def checkpoints(
    run: RunFolder,
    export: Annotated[
        Path | None, typer.Option(help="Write the weights of the newest good one to this safetensors file.")
    ] = None,
    export_dcp: Annotated[
        Path | None,
        typer.Option(
            "--export-dcp",
            help="Write model and optimiser state of the newest good one to this new folder, as "
            "torch.distributed.checkpoint (FSDP2, torchtitan, Lightning) reads them.",
        ),
    ] = None,
    import_dcp: Annotated[
        Path | None,
        typer.Option(
            "--import-dcp",
            help="Make RUN a new run that begins with this folder of torch.distributed.checkpoint.",
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="With --import-dcp: the class that the optimiser's state is of, AdamW for one."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Read every byte and compare checksums.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """List a run's checkpoints, newest first, and say which of them are good.

    RUN may be the folder of one checkpoint as well. The exit code is 1 where the newest is not good, or there
    is none; --resume then takes the newest good one. --export writes parameters and buffers under the model's
    own names, which plain PyTorch reads without evener. After --import-dcp, evener train SCRIPT --run-dir RUN
    --resume latest goes on from there under any plan.
    """
    from rich.console import Console

    from evener.cli.train import print_json
    from evener.errors import FileError, UsageError

    if optimizer and import_dcp is None:
        raise UsageError("--optimizer says of what --import-dcp is, and there is none", remedy="both or none")
    if import_dcp is None and not run.is_dir():
        raise FileError(f"{run} is no folder", remedy="the folder of a run, as evener train names it")
    from evener.session.checkpoints.saved import export_weights, listed

    console = Console(stderr=as_json)
    result: dict[str, Any] = {}
    if import_dcp is not None:
        from evener.session.checkpoints.from_dcp import import_dcp as take

        with _progress("importing") as done:
            moved = take(import_dcp, run, optimizer, done)
        console.print(_told("imported", moved), soft_wrap=True)
        result["imported_dcp"] = moved.as_json()
    found = listed(run, verify=verify)
    console.print(_table(found, verify=verify) if found else f"{run} has no checkpoint")
    result["checkpoints"] = [one.as_json() for one in found]
    if export is not None:
        source = export_weights(run, export)
        console.print(f"weights of {source.name} written to {export}")
        result["exported"] = {"from": str(source), "to": str(export)}
    if export_dcp is not None:
        from evener.session.checkpoints.to_dcp import export_dcp as write

        with _progress("exporting") as done:
            moved = write(run, export_dcp, done)
        console.print(_told("written", moved), soft_wrap=True)
        result["exported_dcp"] = moved.as_json()
    if as_json:
        print_json(result)
    if not found or found[0].problem:
        raise typer.Exit(1)


def _table(found: Sequence[Any], *, verify: bool) -> Any:
    from rich.table import Column, Table

    name = Column("checkpoint", no_wrap=True)  # by which one is taken, however narrow the terminal is
    state = Column("state", overflow="fold")
    table = Table(name, "step", "samples", "MiB", "shards", "model", state, box=None)
    for one in found:
        said = one.problem or ("good" if verify else "not verified")
        size = "" if one.num_bytes is None else f"{one.num_bytes / 2**20:.1f}"
        shown = [one.step, one.samples_seen, size, one.num_shards, one.model_id]
        table.add_row(one.name, *("" if x is None else str(x) for x in shown), said)
    return table


def _told(word: str, moved: Any) -> str:
    left = f"; not in it: {', '.join(moved.left)}" if moved.left else ""
    left += f"\nnote: {moved.note}" if moved.note else ""
    size = f"{counted(moved.num_tensors, 'tensor')}, {in_bytes(moved.num_bytes)}"
    return f"{size} {word} from {moved.source} to {moved.to}{left}"


@contextmanager
def _progress(word: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn(word), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
