"""`ev.save_checkpoint`, `ev.load_checkpoint`: checkpoints of a loop of one's own over what `ev.prepare` gave.

    for x, y in loader:
        …
        optimizer.step()
        if loader.at_boundary and loader.position.step % 500 == 0:
            ev.save_checkpoint("runs/mine", model, optimizer, loader)     # in every process, last in the turn

`ev.load_checkpoint("runs/mine", model, optimizer, loader)` goes on from there, on any number of devices.
"""

import atexit
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evener import __version__
from evener.core.tell import tell
from evener.errors import UsageError
from evener.runtime.checkpoints.manifest import FORMAT, Manifest, Position, model_id
from evener.runtime.ranks import Ranks
from evener.session.checkpoints.save_rule import Keep
from evener.session.checkpoints.saved import chosen, fill
from evener.session.checkpoints.saver import Own, Saver
from evener.session.checkpoints.state import (
    View,
    check_position,
    infos_of,
    own_of,
    restore_generators,
    tied_names,
)
from evener.session.checkpoints.tensors import saved_tensors
from evener.session.drop_in.loader import ShareLoader
from evener.session.drop_in.options import check_options, options_of, set_options


class LoopState:
    """The state of a loop as a `Saver` takes it: every device holds everything."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: ShareLoader, scheduler: Any
    ) -> None:
        self.model, self._optimizer, self.loader, self.scheduler = model, optimizer, loader, scheduler

    @property
    def ranks(self) -> Ranks:
        return self.loader.ranks

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def own(self) -> Own:
        held, devices = saved_tensors(self.model), self.ranks.devices
        pipelines = self.loader.plan.pipelines
        mine = sum(p.samples for p in pipelines if self.ranks.here in p.devices)
        part = mine / self.loader.plan.global_batch
        return own_of(
            View(
                model=self.model,
                held=held,
                holders=dict.fromkeys(held, devices),
                ranks=self.ranks,
                optimizer=self.optimizer,
                device=self.loader.device,
                parts=dict.fromkeys(held, part),
            )
        )

    def manifest(self) -> Manifest:
        return Manifest(
            format=FORMAT,
            number=0,
            position=self.loader.position,
            optimizer=type(self.optimizer).__name__,
            model_id=model_id(infos_of(self.model)),
            shards=(),
            options=options_of(self.optimizer, self.scheduler),
            tied=tied_names(self.model),
            written_by=f"evener {__version__}",
        )


def save_checkpoint(
    run: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: ShareLoader,
    *,
    scheduler: Any = None,
    keep: int = 3,
    wait: bool = False,
) -> None:
    """Save a loop over what `ev.prepare` gave, as it is now; called in every process at the same place.

    `run` is the folder of the run, seen by all processes; the newest `keep` checkpoints stay. Returns when
    copies are under way, which a thread writes; an earlier checkpoint that is still being written is waited
    for. Until the next optimizer.step() nothing else may change parameters. `wait` returns when this process
    is done, on the first process when all are. What goes wrong is printed and ends nothing. UsageError in the
    middle of a global batch (see `loader.at_boundary`), and for another model or optimiser than before.
    """
    position = loader.position
    options_of(optimizer, scheduler)  # refused here, and not in one process alone
    savers = loader.__dict__.setdefault("savers", {})
    key = str(run)
    if key not in savers:
        state = LoopState(model, optimizer, loader, scheduler)
        saver = Saver(state, Path(run), loader.meeting, Keep(last=keep), tell, name=f"loop {len(savers)}")
        savers[key] = saver
        atexit.register(saver.join)
    state = savers[key].subject
    if state.model is not model or state.optimizer is not optimizer:
        raise UsageError(
            f"{run} is saved with another model or optimiser over this loader",
            remedy="a folder of their own for these, or the objects of the first save_checkpoint",
        )
    state.scheduler = scheduler
    savers[key].begin(position.samples_seen)
    if wait:
        savers[key].join()


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loader: ShareLoader | None = None,
    *,
    scheduler: Any = None,
) -> Position:
    """Put a checkpoint, or the newest good one of a run's folder, into a model and optimiser.

    Every byte is checked first. Works in plain PyTorch, and in every process of a loop over what `ev.prepare`
    gave: the next turn of `loader` is then the one that would have come. Returns where in its data the run
    was: `step`, `samples_seen` and what the order of samples follows from. Options of parameter groups
    (learning rate, ...) are set where a loop of one's own saved them; a recipe's follow from samples seen.
    StateError where it is damaged, or of another model, optimiser or order of samples; nothing has changed
    then.
    Example: `load_checkpoint("runs/text-…", model, optimizer).samples_seen`.
    """
    checkpoint = chosen(path)
    manifest = checkpoint.manifest
    if loader is not None:
        check_position(manifest.position, loader.position, checkpoint)
    if optimizer is not None:
        check_options(manifest.options, optimizer, scheduler)
    fill(checkpoint, model, optimizer, loader.ranks.here if loader else None)
    if optimizer is not None:
        set_options(manifest.options, optimizer, scheduler)
    if loader is not None:
        loader.go_on_from(manifest.position)
        for sentence in restore_generators(checkpoint, loader.ranks.here, loader.device):
            tell(sentence)
    return manifest.position
