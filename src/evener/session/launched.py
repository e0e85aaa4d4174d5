"""How this process was started, as its environment says. No torch in here: asked before it is loaded."""

import os

from evener.errors import UsageError


def is_launched() -> bool:
    """Whether this process was started as one of several by torchrun or by evener."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_unlaunched(verb: str) -> None:
    """UsageError where this process is one of several already, and `verb` would start its own."""
    if is_launched():
        raise UsageError(
            f"{verb} starts its own processes, and this is one of several already (RANK is set)",
            remedy=f"{verb} SCRIPT without torchrun",
        )


def world_size_here() -> int | None:
    """How many processes this job was started with; None where nobody started several."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else None
