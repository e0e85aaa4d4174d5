"""`ev.train`: the library's front door, five lines around an unmodified model."""

import time
from pathlib import Path

from evener.core.fleet import Fleet
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.core.words import counted
from evener.errors import UsageError
from evener.session.ask import fleet_here
from evener.session.checkpoints.resume import check_folder
from evener.session.checkpoints.save_rule import Keep, rule_of
from evener.session.journal import Outcome
from evener.session.launched import world_size_here
from evener.session.launching.launch import run_here
from evener.session.recipe import Recipe, check_recipe
from evener.session.request import Request, folder_at, new_run_dir


def train(
    recipe: Recipe,
    *,
    steps: int | None = None,
    epochs: float | None = None,
    fleet: Fleet | None = None,
    plan: Plan | None = None,
    profile: Profile | None = None,
    batch_per_device: dict[str, int] | list[int] | None = None,
    rehearse: bool = False,
    seed: int = 0,
    run_dir: str | Path | None = None,
    checkpoint_every: int | str | None = None,
    keep_checkpoints: int = 3,
    resume: str | Path | None = None,
    quiet: bool = False,
) -> Outcome | None:
    """Train `recipe.model` in place; call it in every process of the job, as often as wanted.

    Start the script with `torchrun --nproc-per-node N script.py` to use N devices; started with plain
    `python` it uses one, in this process, whatever the host has (`evener train` starts processes by itself).
    Several calls are several runs, in the same order in every process.
    `batch_per_device` is a list in the fleet's order or {device: samples}.
    checkpoint_every: steps (200) or a time ("10min"); resume: a run's folder, a checkpoint's, or "latest" for
    what `run_dir` has, if anything. A run that goes on counts steps and epochs from its beginning.
    Returns the outcome on the leading process, None on the others. Raises the errors of evener, each naming
    the device.
    """
    check_recipe(recipe)
    fleet = fleet or fleet_here(None, world_size_here() or 1)
    if isinstance(batch_per_device, list):
        names = [d.name for d in fleet.devices]
        if len(names) != len(batch_per_device):
            raise UsageError(
                f"batch_per_device has {counted(len(batch_per_device), 'number')} for "
                f"{counted(len(names), 'device')}",
                numbers=f"devices: {', '.join(names)}",
                remedy="one number a process, in their order; 0 leaves one out",
            )
        batch_per_device = dict(zip(names, batch_per_device, strict=True))
    if run_dir:
        check_folder(Path(run_dir), str(resume) if resume else None)
    folder = run_dir or new_run_dir(recipe.name or "run", time.strftime("%Y%m%d-%H%M%S"))
    request = Request(
        fleet=fleet,
        run_dir=folder_at(Path(folder)),
        rehearse=rehearse,
        steps=steps,
        epochs=epochs,
        plan=plan,
        profile=profile,
        batch_per_device=batch_per_device,
        seed=seed,
        checkpoint=rule_of(checkpoint_every, Keep(last=keep_checkpoints)) if checkpoint_every else None,
        resume=str(resume) if resume else None,
        quiet=quiet,
    )
    return run_here(request, recipe)
