"""`evener probe`: measure this host and write its fleet file."""

import json
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from evener.cli.options import AsJson
from evener.core.addresses import host_and_port
from evener.core.fleet import Disk, Fleet
from evener.errors import EnvironmentBrokenError, UsageError


def probe(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Fleet files to put together, with --merge.")
    ] = None,
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
    merge: Annotated[
        bool,
        typer.Option("--merge", help="Measure nothing: put the fleet files of several hosts together."),
    ] = False,
    gather: Annotated[
        int | None,
        typer.Option(min=2, help="Be the first of so many hosts that make one fleet; others --join."),
    ] = None,
    listen: Annotated[
        str, typer.Option(help="HOST:PORT for --gather; 0.0.0.0:4711 for others than this machine.")
    ] = "127.0.0.1:0",
    join: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of the host that gathers; its token in EVENER_TOKEN. Measures links to it."
        ),
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option(
            help="Measure the disk of this folder too (some seconds): optimiser state may lie there."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the devices and links of this host, or make one fleet of several hosts.

    Writes a fleet file: for each device torch can use its identity, memory, matrix rate by dtype, memory
    bandwidth and launch cost, and the links between processes and between host and device. Each number has
    its source and a spread; a second probe differs by less than that.

    Several hosts: `evener probe --gather 3 --listen 0.0.0.0:4711 -o fleet.json` on one, and on the others
    `EVENER_TOKEN=... evener probe --join FIRST:4711 -o fleet.json` measure the links between all of them as
    well. `evener probe --merge a.json b.json -o fleet.json` only puts files together.
    """
    from evener.core.files import check_target, write

    check_target(output)
    if merge:
        fleet = _merged(files or [], gather or join or devices or host or disk)
    else:
        if files:
            raise UsageError(
                "files are for --merge", remedy="evener probe --merge a.json b.json -o fleet.json"
            )
        if gather and join:
            raise UsageError("a host gathers or joins", remedy="--gather on one host, --join on the others")
        measure = partial(_measured, host, devices, quick, links, disk)
        fleet = (
            _gathered(measure, gather, listen) if gather else _joined(measure, join) if join else measure()
        )
    if output:
        write(output, fleet)
    _show(fleet, output)
    if as_json:
        print(json.dumps(_summary(fleet, output)))


def _measured(host: str | None, devices: str | None, quick: bool, links: bool, disk: Path | None) -> Fleet:
    from evener.probing import probe as measure
    from evener.probing.disk import measure_disk

    wanted = [w.strip() for w in devices.split(",") if w.strip()] if devices else None
    with _progress() as progress:
        fleet = measure(host=host, devices=wanted, quick=quick, links=links, progress=progress)
    return _with_disk(fleet, measure_disk(disk)) if disk else fleet


def _with_disk(fleet: Fleet, disk: Disk) -> Fleet:
    """With `disk` at the host's CPU."""
    from msgspec.structs import replace

    if not any(d.type == "cpu" for d in fleet.devices):
        raise UsageError(
            "a disk is told with the host's CPU, which was not measured", remedy="cpu among --devices"
        )
    devices = tuple(replace(d, disk=disk) if d.type == "cpu" else d for d in fleet.devices)
    return replace(fleet, devices=devices)


def _merged(files: list[Path], others: object) -> Fleet:
    from evener.core.catalogue import read_fleet
    from evener.core.merging import merge

    if others or len(files) < 2:
        raise UsageError(
            "--merge takes two or more fleet files and measures nothing",
            remedy="evener probe --merge a.json b.json -o fleet.json",
        )
    return merge({str(f): read_fleet(f) for f in files})


def _gathered(measure: Callable[[], Fleet], num_hosts: int, listen: str) -> Fleet:
    import socket

    from evener.probing import joining

    token = joining.new_token()
    host, port = host_and_port(listen)
    try:
        listener = socket.create_server((host, port))
    except OSError as e:
        raise EnvironmentBrokenError(
            f"cannot listen at {listen}: {e.strerror}", remedy="a free port and an address of this host"
        ) from e
    with listener:
        port = listener.getsockname()[1]
        _say(f"on each other host: EVENER_TOKEN={token} evener probe --join {host}:{port} -o fleet.json")
        if host == "0.0.0.0":  # the user asked for it
            _say("(with this host's name or address in place of 0.0.0.0)")
        return joining.gather(measure(), num_hosts, listener, token=token, say=_say)


def _joined(measure: Callable[[], Fleet], address: str) -> Fleet:
    import os

    from evener.probing import joining

    token = os.environ.get("EVENER_TOKEN", "")
    if not token:
        raise UsageError("joining needs a token", remedy="EVENER_TOKEN=... as the first host printed it")
    host_and_port(address)  # a wrong one is told before anything is measured
    return joining.join(measure(), address, token=token, say=_say)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
        if d.disk:
            rows += [("disk, reading", d.disk.read_bytes_per_s, 1e9, "GB/s")]
            rows += [("disk, writing", d.disk.write_bytes_per_s, 1e9, "GB/s")]
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
