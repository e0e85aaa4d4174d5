"""`evener env`: environments for the hosts at hand or for named kinds."""

import json
from pathlib import Path
from typing import Annotated

import typer

from evener.cli.options import AsJson


def env(
    hosts: Annotated[
        list[Path] | None,
        typer.Argument(help="Files of evener doctor --save, one a host. Default: this host, looked at now."),
    ] = None,
    fleet: Annotated[Path | None, typer.Option(help="For the devices of this fleet file instead.")] = None,
    kinds: Annotated[
        str | None,
        typer.Option(help="For these kinds instead, with commas: RTX 3060, Tesla T4, sm_61, gfx1100, cpu."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write a folder for each environment here.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a Dockerfile, a conda environment and pip lines for each group of devices that share a build.

    The files take torch from the index that the environment variable TORCH_INDEX names, whose folders are
    called like the builds (cu126, rocm7.2, cpu). Says when one job needs several builds, which then talk over
    Gloo.
    """
    from evener.core.files import write_bytes
    from evener.diagnosis.environments import environments, transports
    from evener.diagnosis.recipes import files

    found = environments(_needs(hosts or [], fleet, kinds))
    for environment in found:
        print(f"{environment.name}: {environment.requirement}, Python environment for")
        for need in environment.needs:
            print(f"  {need.name} ({need.arch}, {need.machine})")
        for note in environment.notes:
            print(f"  {note}")
        for name, text in files(environment).items():
            if output:
                write_bytes(output / environment.name / name, text.encode())
    print(transports(found))
    print(f"written to {output}" if output else "not written: name a folder with -o")
    if as_json:
        import msgspec

        print(
            json.dumps(
                {"output": str(output) if output else None, "environments": msgspec.to_builtins(found)}
            )
        )


def _needs(hosts: list[Path], fleet: Path | None, kinds: str | None):
    from evener.core.catalogue import read_fleet
    from evener.core.files import read
    from evener.core.host import HostFacts
    from evener.diagnosis import environments as of
    from evener.errors import UsageError

    named = [k.strip() for k in (kinds or "").split(",") if k.strip()]
    if kinds is not None and not named:
        raise UsageError(f"--kinds {kinds!r} names no kind", remedy="--kinds 'RTX 3060, cpu'")
    if sum(map(bool, (hosts, fleet, named))) > 1:
        raise UsageError("hosts, --fleet and --kinds are three ways to say one thing", remedy="one of them")
    if fleet:
        return of.needs_of_fleet(read_fleet(fleet))
    if named:
        return tuple(of.needs_of_kind(k) for k in named)
    if hosts:
        return of.needs_of_hosts([read(f, HostFacts) for f in hosts])
    from evener.probing.host import look

    return of.needs_of_hosts([look(measure=False)])
