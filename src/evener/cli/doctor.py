"""`evener doctor`: what this host, or all hosts of a job, can do, and what mends the rest."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from evener.cli.options import AsJson
from evener.core.host import BUSY_LOAD, HostFacts
from evener.core.words import counted, printable

STYLES = {"works": "green", "slow": "yellow", "fails": "bold red"}
SAID = {"works": "works", "slow": "works slowly", "fails": "will fail"}


def doctor(
    hosts: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Files of --save to judge instead of this host; several are judged as the hosts of one job."
        ),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write what was found on this host to this file.")] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Name or address of another host of the job: looks up the route; may be repeated."),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Name of this host in the job. Default: its host name.")
    ] = None,
    measure: Annotated[
        bool, typer.Option(help="Time matrix products in each data type on each device (seconds each).")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Look at every device, driver, build, limit, network and setting, and grade what is found.

    Shows all devices the host has, also those that torch cannot use and why; versions; settings with their
    origin; and for each finding its code, the evidence and the line that mends it. docs/doctor.md has a
    section for each code. Exit code 0: nothing will fail; 1: something will; 2: wrong use.
    """
    from evener.core.files import check_target, read, write
    from evener.diagnosis.across import across, pairs
    from evener.diagnosis.finding import GRADES, worst
    from evener.diagnosis.findings import findings
    from evener.errors import UsageError

    if hosts and (save or peer or host):
        raise UsageError(
            "--save, --peer and --host are about this host, files about others", remedy="one or the other"
        )
    check_target(save)
    if hosts:
        facts = [read(f, HostFacts) for f in hosts]
    else:
        from evener.probing.host import look

        command_line = {"peer": ",".join(peer)} if peer else {}
        facts = [look(host=host or "", peers=peer or (), measure=measure, command_line=command_line)]
    if save:
        write(save, facts[0])
    together = len(facts) > 1
    found = [*across(facts), *(f for h in facts for f in findings(h, peers=together))]
    found.sort(key=lambda f: -GRADES.index(f.grade))
    grade = worst(tuple(found))
    _show(facts, found, pairs(facts))
    print(f"{SAID[grade]}" + (f"; written to {save}" if save else ""))
    if as_json:
        import msgspec

        told = {"grade": grade, "findings": found, "pairs": pairs(facts), "hosts": facts}
        print(json.dumps(msgspec.to_builtins(told)))
    if grade == "fails":
        raise typer.Exit(1)


def _show(facts: list[HostFacts], found: list[Any], pairs: tuple[Any, ...]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for one in facts:
        console.print(Text(printable(_versions(one)), style="dim"))
        for setting in one.settings:
            console.print(
                Text(printable(f"  {setting.name}={setting.value} ({setting.origin})"), style="dim")
            )
        for told in (_cpu(one), _limits(one)):
            console.print(Text(printable(f"  {told}"), style="dim"))
    for pair in pairs:
        console.print(Text(printable(f"{pair.a} - {pair.b}: {pair.transport} ({pair.why})")))
    for finding in found:
        line = Text(f"{SAID[finding.grade]:13}", style=STYLES[finding.grade])
        line.append(printable(f"{finding.code} {finding.where}: {finding.what}"), style="default")
        console.print(line)
        if finding.evidence:
            console.print(Text(printable(f"{'':13}{finding.evidence}"), style="dim"))
        if finding.mend:
            console.print(Text(printable(f"{'':13}{finding.mend}"), style="bold"))


def _versions(facts: HostFacts) -> str:
    """One line on what is installed; what is unknown is left out."""
    torch, nvidia, amd = facts.torch, facts.nvidia, facts.amd
    parts = {
        "": f"{facts.system} {facts.kernel} {facts.machine}".strip(),
        "container": facts.container,
        "WSL": "yes" if facts.wsl else "",
        "Python": facts.python,
        "torch": torch.version if torch else "none",
        "CUDA": (torch.cuda or "") if torch else "",
        "ROCm build": (torch.hip or "") if torch else "",
        "NCCL": (torch.nccl or "") if torch else "",
        "NVIDIA driver": nvidia.version if nvidia else "",
        "ROCm": amd.rocm if amd else "",
        "evener": facts.evener,
    }
    return f"{facts.host}: " + ", ".join(f"{name} {value}".strip() for name, value in parts.items() if value)


def _cpu(facts: HostFacts) -> str:
    rates = [f"{name} {rate / 1e9:.4g} GFLOP/s" for name, rate in facts.cpu.dtypes.items()]
    rates += [f"{name} does not run" for name in facts.cpu.dtype_errors]
    threads = counted(facts.cpu.threads, "thread") if facts.cpu.threads else ""
    if facts.cpu.dtypes:
        rates.append("each the fastest of a few calls")
    told = ", ".join(x for x in (f"CPU {facts.cpu.model or 'unknown'}", threads, *rates) if x)
    if not facts.cpu.dtypes or facts.load is None or facts.load <= BUSY_LOAD * (facts.cpu.threads or 1):
        return told
    return f"{told}; busy with other work (load average {facts.load:.1f}), quiet it is faster"


def _limits(facts: HostFacts) -> str:
    """One line on shared memory, limits and memory nodes; what is unknown is left out."""
    from evener.core.host import UNLIMITED

    parts = []
    if facts.shm_bytes is not None:
        parts.append(f"/dev/shm {facts.shm_bytes / 2**20:.0f} MiB")
    for name, value in (("open files", facts.open_files), ("bytes that may be locked", facts.locked_bytes)):
        if value is not None:
            parts.append(f"{name}: {'no limit' if value == UNLIMITED else value}")
    if facts.cpu.nodes:
        parts.append(f"memory nodes {', '.join(map(str, facts.cpu.nodes))}")
    for i in facts.interfaces:
        rate = f" {i.bits_per_s / 1e9:g} Gbit/s" if i.bits_per_s else ""
        parts += [f"{i.name} {', '.join(i.addresses)}{rate}"] if i.up and i.addresses else []
    parts += [f"{r.peer} over {r.interface or 'no interface'}" for r in facts.routes]
    return "; ".join(parts)
