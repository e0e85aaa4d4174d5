"""Advice as text: the changes that help, each with its gain, its sum and what it assumes."""

from collections.abc import Sequence
from typing import Any

import msgspec

from evener.planner.advise import Counsel, Gain
from evener.report.tables import percent, render

_FEW = 8


def counsel_text(found: Counsel, *, everything: bool = False) -> str:
    """For a person; `everything` lists what does not help, too."""
    lines = [f"now: {found.now}" if found.now else f"now: {found.why_not}"]
    lines += [f"     {a}" for a in found.assumed]
    if found.now and not found.now.played:
        lines.append("the profile has no seconds by layer: gains are the planner's, nothing was played")
    for number, gain in enumerate(found.helps, start=1):
        lines += [f"{number}. {gain.change}: {_gained(gain)}", f"     then: {gain.after}"]
        lines += [f"     assumed: {a.removeprefix('assumed: ')}" for a in gain.assumed]
    if not found.helps:
        tried = len(found.others)
        lines.append(
            f"nothing would help: of {tried} changes tried none gives a hundredth more samples a second"
        )
    if everything:
        lines += [f"also tried: {g.change}: {_gained(g)}" for g in found.others]
    else:
        lines += _few("in their place, or behind them", [g for g in found.others if g.helps])
        lines += _few("less than 1 %, or nothing", [g for g in found.others if not g.helps])
    lines += [f"could not be computed: {change}: {why}" for change, why in found.failed.items()]
    return render(*lines)


def _few(title: str, gains: Sequence[Gain]) -> list[str]:
    best = ", ".join(f"{g.change} {_short(g)}" for g in gains[:_FEW])
    more = len(gains) - _FEW
    return [f"{title}: {best}" + (f" and {more} more (--all)" if more > 0 else "")] if gains else []


def _gained(gain: Gain) -> str:
    speed = f"{gain.after.samples_per_s:.4g} samples/s"
    if gain.gain is None:
        return f"the job fits, {speed}"
    how = "simulated" if gain.after.played else "planned"
    return f"{percent(gain.gain, sign=True)} samples/s ({speed}, {how})"


def _short(gain: Gain) -> str:
    return "(fits)" if gain.gain is None else percent(gain.gain, sign=True)


def counsel_object(found: Counsel) -> dict[str, Any]:
    """For a program; its keys are promised."""
    return {
        "now": msgspec.to_builtins(found.now) if found.now else None,
        "why_not": found.why_not,
        "helps": [msgspec.to_builtins(g) for g in found.helps],
        "others": [msgspec.to_builtins(g) for g in found.others],
        "failed": found.failed,
        "assumed": list(found.assumed),
    }
