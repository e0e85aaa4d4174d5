"""A preflight's verdict as text: each process's interface and why, each pair's rate, what is to be set."""

from typing import Any

import msgspec

from evener.core.ways import Verdict, Way, mbit
from evener.core.words import counted
from evener.report.tables import duration, render, table


def verdict_text(verdict: Verdict) -> str:
    """For a person. Reasons appear word for word."""
    lines: list[Any] = [f"preflight: {counted(len(verdict.ways), 'pair')} in {duration(verdict.seconds)}"]
    for door in verdict.doors:
        where = f"{door.interface} {door.address}".strip() or "nothing"
        lines.append(f"  {door.process} listens on {where}: {door.why}")
    alive = [_row(w) for w in verdict.ways if not w.dead]
    lines += [table(["from", "to", "over", "latency", "rate"], alive, left=3)] if alive else []
    lines += [f"dead: {w.why}" for w in verdict.dead]
    wanted: dict[str, list[str]] = {}
    for process, variables in verdict.variables.items():
        said = " ".join(f"{name}={value}" for name, value in variables.items())
        wanted.setdefault(said, []).append(process)
    lines += [f"to be set for {', '.join(who)}: {said}" for said, who in wanted.items() if said]
    return render(*lines, *verdict.notes)


def verdict_object(verdict: Verdict) -> dict[str, Any]:
    """For a program; its keys are promised."""
    return {**msgspec.to_builtins(verdict), "dead": [msgspec.to_builtins(w) for w in verdict.dead]}


def _row(way: Way) -> list[str]:
    same = way.interface_a == way.interface_b
    over = way.interface_a if same else f"{way.interface_a} - {way.interface_b}"
    latency = duration(way.latency_s) if way.latency_s else ""
    return [way.a, way.b, over, latency, mbit(way.bytes_per_s) if way.bytes_per_s else ""]
