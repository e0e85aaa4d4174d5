"""`evener probe`: measure this host and write its fleet file."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from evener.core.fleet import Fleet


def probe(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the fleet file here, for example fleet.json.")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="Measure only these: cpu, cuda:1, gpu0, cuda (all of a type), with commas. Default: all."
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Name of this host in the fleet. Default: its host name.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer rounds: about 6 s instead of 17, with wider spreads.")
    ] = False,
    links: Annotated[bool, typer.Option(help="Measure messages between two processes as well.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line of standard output.")
    ] = False,
) -> None:
    """Measure the devices and links of this host.

    Writes a fleet file: for each device torch can use its identity, memory, matrix rate by dtype, memory
    bandwidth and launch cost, and the links between processes and between host and device. Each number has
    its source and a spread; a second probe differs by less than that.
    """
    from evener.core.files import write
    from evener.probing import probe as measure

    wanted = [w.strip() for w in devices.split(",") if w.strip()] if devices else None
    with _progress() as progress:
        fleet = measure(host=host, devices=wanted, quick=quick, links=links, progress=progress)
    if output:
        write(output, fleet)
    _show(fleet, output)
    if as_json:
        print(json.dumps(_summary(fleet, output)))


@contextmanager
def _progress():
    """A bar on standard error when that is a terminal, else None."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = TextColumn("measuring"), BarColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda part, name: bar.update(task, completed=part, description=name)


def _show(fleet: Fleet, output: Path | None) -> None:
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    for d in fleet.devices:
        console.print(f"{d.name}: {d.kind}", style="bold")
        rows = [("free memory", d.free_memory_bytes, 2.0**30, "GiB")]
        rows += [(f"matrix products, {name}", figure, 1e9, "GFLOP/s") for name, figure in d.flops.items()]
        rows += [("memory", d.bytes_per_s, 1e9, "GB/s"), ("one small operation", d.launch_s, 1e-6, "µs")]
        for label, figure, unit, unit_name in rows:
            if figure:
                console.print(f"  {label:26}{figure.value / unit:9.4g} {unit_name:8} ±{figure.spread:.0%}")
    for link in fleet.links:
        ends = "between processes" if link.a == link.b else f"{link.a} - {link.b}"
        curve = link.curve
        console.print(
            f"{ends}: {curve.seconds(64) * 1e6:.0f} µs for 64 B, {curve.seconds(2**24) * 1e3:.2f} ms "
            f"for 16 MiB (±{curve.spread:.0%})"
        )
    for note in fleet.note.split("; "):
        console.print(note, style="dim")
    print(f"written to {output}" if output else "not written: name a file with -o", file=sys.stderr)


def _summary(fleet: Fleet, output: Path | None) -> dict:
    import msgspec

    return {"output": str(output) if output else None, "fleet": msgspec.to_builtins(fleet)}
