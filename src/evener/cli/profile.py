"""`evener profile`: measure the user's model and write its profile file."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from evener.cli.options import MAX_SEED, AsJson
from evener.core.profile import Profile
from evener.core.words import counted
from evener.errors import UsageError


def profile(
    script: Annotated[
        str, typer.Argument(help="A Python file with a function recipe() that returns an evener.Recipe.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write the profile file here, for example profile.json."),
    ] = None,
    fleet: Annotated[
        Path | None,
        typer.Option(help="Measure on the devices of this fleet file that are on this host. Default: probe."),
    ] = None,
    rehearse: Annotated[
        Path | None, typer.Option(help="Measure on paced devices that behave as those of this fleet file.")
    ] = None,
    micro_batches: Annotated[
        str | None,
        typer.Option(
            help="Sizes to measure, in samples, with commas between: 1,2,4. Default: powers of two."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Seed of the weights and of all else that is random.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure seconds and bytes of a model's layers and of its whole step.

    For each kind of device and several micro-batch sizes: forward, backward and optimiser. A size that does
    not fit in memory is a result, not an error.
    """
    from evener.core.catalogue import read_fleet
    from evener.core.files import check_target, write
    from evener.session.ask import alike_by_kind, check_script

    if fleet and rehearse:
        raise UsageError(
            "--fleet and --rehearse were both given",
            remedy="--fleet for the devices of this host, --rehearse for devices that are only played",
        )
    check_script(Path(script))
    check_target(output)
    file = fleet or rehearse
    devices = read_fleet(file) if file else None
    sizes = parse_sizes(micro_batches) if micro_batches else None
    from evener.session.planning.measure import profile_recipe  # loads torch

    measured = profile_recipe(
        script,
        fleet=alike_by_kind(devices) if devices and rehearse else devices,
        rehearse=rehearse is not None,
        micro_batches=sizes,
        seed=seed,
        report=lambda text: print(text, file=sys.stderr),
    )
    if output:
        write(output, measured)
    _show(measured)
    print(f"written to {output}" if output else "not written: name a file with -o", file=sys.stderr)
    if as_json:
        import msgspec

        summary = {"output": str(output) if output else None, "profile": msgspec.to_builtins(measured)}
        print(json.dumps(summary))


def parse_sizes(text: str) -> tuple[int, ...]:
    """Micro-batch sizes from "1,2,4", in rising order; UsageError for all but whole numbers above 0."""
    try:
        sizes = sorted({int(word) for word in text.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise UsageError(
            f"--micro-batches {text!r} is no list of sizes", remedy="whole numbers above 0, as in 1,2,4"
        )
    return tuple(sizes)


def _show(profile: Profile) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True, highlight=False)
    params = sum(layer.num_params for layer in profile.layers)
    console.print(
        f"{profile.model}: {counted(len(profile.layers), 'layer')}, {params:,} parameters, {profile.dtype}"
    )
    for kind in profile.kinds:
        columns = ("samples", "input", "forward", "backward", "update", "peak")
        table = Table(*columns, title=kind, title_justify="left")
        for step in (s for s in profile.steps if s.kind == kind):
            seconds = (step.input_s, step.forward_s, step.backward_s, step.update_s)
            cells = [f"{f.value * 1e3:.3g} ms ±{f.spread:.0%}" if f else "-" for f in seconds]
            peak = f"{step.peak_bytes.value / 2**20:.4g} MiB" if step.peak_bytes else "-"
            table.add_row(str(step.micro_batch), *cells, peak if step.fits else "does not fit")
        console.print(table)
    for note in filter(None, profile.note.split("; ")):
        console.print(note, style="dim")
