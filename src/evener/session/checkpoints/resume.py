"""Taking a run up again: which checkpoint, agreed on by all devices, and what could not be the same."""

import glob
from pathlib import Path

from evener.core.figures import Value
from evener.core.words import counted, some
from evener.errors import StateError, UsageError
from evener.report.metrics import drop_from, read_metrics
from evener.runtime.checkpoints.folder import Checkpoint, checkpoints_in, newest_good, open_checkpoint
from evener.runtime.checkpoints.manifest import MANIFEST, Position
from evener.runtime.hardware import ALLOCATED, peak_bytes
from evener.session.checkpoints.state import check_position, restore
from evener.session.loop.steps import Steps
from evener.session.request import LATEST, runs_folder

METRICS = "metrics.jsonl"
RESUME = "resume"  # where the leader tells what it chose
MOST_LISTED = 8


class Chosen(Value, frozen=True, kw_only=True):
    """The checkpoint that the leader chose, every byte of it checked; empty for none."""

    path: str = ""
    notes: tuple[str, ...] = ()


def choose(resume: str, run_dir: Path) -> Chosen:
    """The checkpoint that `resume` means.

    A checkpoint's own folder: that one or StateError. A run's folder: its newest good one, or StateError.
    "latest": the newest good one of `run_dir`; none at all where there is none yet, so that one command both
    begins a run and takes it up again.
    """
    if resume != LATEST and (Path(resume) / MANIFEST).exists():
        return Chosen(path=str(open_checkpoint(Path(resume)).path.resolve()))
    run = run_dir if resume == LATEST else Path(resume)
    found, passed = newest_good(run)
    if found:
        return Chosen(path=str(found.path.resolve()), notes=passed)
    if passed:
        raise StateError(f"no checkpoint of {run} is good", numbers="; ".join(passed))
    if resume == LATEST:
        return Chosen(notes=(f"no checkpoint in {run} yet: the run starts from the beginning",))
    beside = [checkpoint.label for checkpoint in checkpoints_in(run.parent)]
    raise UsageError(
        f"{run} has no checkpoint",
        numbers=f"{run.parent} has {some(beside, MOST_LISTED)}" if beside else "",
        remedy="the folder of a run that was started with --checkpoint-every, or of one of its checkpoints",
    )


def check_folder(run_dir: Path, resume: str | None) -> None:
    """UsageError where `run_dir` holds another run than the one that goes on: their files would be mixed."""
    if resume and (resume == LATEST or run_dir.resolve() in (Path(resume) / "in").resolve().parents):
        return
    saved, metrics = checkpoints_in(run_dir), run_dir / METRICS
    found = [METRICS] if metrics.is_file() and metrics.stat().st_size else []
    found += [f"{counted(len(saved), 'checkpoint')}, the newest {saved[0].label}"] if saved else []
    if found:
        goes_on = "--resume latest goes on with that run; " if saved else ""
        raise UsageError(
            f"{run_dir} holds another run, and a new one would be mixed with it",
            numbers=" and ".join(found),
            remedy=f"{goes_on}another --run-dir for a new one",
        )


def stopped(run_dir: Path, script: str, *, saves: bool = False) -> str:
    """What a person who has ended a run needs to know: how far it came, what is saved, how it goes on.

    `saves` says whether it was to save checkpoints.
    """
    metrics = run_dir / METRICS
    records = read_metrics(metrics).records if metrics.is_file() else ()
    if not records:
        return "stopped before the first step"
    saved = checkpoints_in(run_dir)
    if saved:
        command = f"evener train {script} --run-dir {run_dir} --resume latest"
        goes_on = (
            f"the newest checkpoint is {saved[0].label}: {command}, with the options it had, goes on from it"
        )
    elif saves:
        goes_on = "no checkpoint was saved: it was ended before there was one"
    else:
        goes_on = "no checkpoint was saved: with --checkpoint-every the run could go on"
    return f"stopped after step {records[-1].step + 1}; files: {run_dir}; {goes_on}"


def chosen_for(resume: str, run_dir: Path, here: Position | None, *, stop: int) -> Chosen:
    """The checkpoint that `resume` means, before anything is measured for a run that would begin at `here`.

    StateError where its samples come in another order (nothing is compared without `here`), UsageError where
    it is at `stop` samples or beyond.
    """
    chosen = choose(resume, run_dir)
    if chosen.path:
        checkpoint = Checkpoint(Path(chosen.path))
        position = checkpoint.manifest.position
        if here is not None:
            check_position(position, here, checkpoint)
        if position.samples_seen >= stop:
            raise UsageError(
                f"the checkpoint {checkpoint.path} is where this run is to end, or beyond",
                numbers=f"step {position.step}, samples seen: {position.samples_seen}, end at {stop}",
                remedy="more --steps or --epochs: they count from the beginning of the run",
            )
    return chosen


def take_up(chosen: Chosen, run_dir: Path, steps: Steps) -> None:
    """Put all devices where the checkpoint was; called by all together.

    Records of steps that will be taken again are dropped from the run's metrics.
    """
    steps.decisions += chosen.notes
    if chosen.path:
        checkpoint = Checkpoint(Path(chosen.path))
        steps.decisions += restore(steps, checkpoint)
        steps.said += [said] if (said := _held_while_loading(steps)) else []
        at = f"step {steps.number}, {counted(steps.samples_seen, 'sample')}"
        steps.decisions.append(f"taken up at {at}, from {checkpoint.path}")
    if steps.ranks.rank == 0:
        drop_from(run_dir / METRICS, steps.number)


def _held_while_loading(steps: Steps) -> str:
    """On an accelerator, which counts its memory: the most it held until here, and what was predicted."""
    held = peak_bytes(steps.site.torch_device)
    if held.note != ALLOCATED:
        return ""
    told = steps.plan.prediction.load_bytes.get(steps.ranks.here) if steps.plan.prediction else None
    predicted = f"predicted {told / 2**20:.4g} MiB" if told else "nothing predicted"
    return f"the run was taken up with at most {held.value / 2**20:.4g} MiB held, {predicted}"


def latest_run(name: str, root: str | None = None) -> Path | None:
    """The newest of the run folders NAME-… in the `runs_folder` that has a checkpoint."""
    base = runs_folder(root)
    found = [p for p in base.glob(f"{glob.escape(name)}-*") if checkpoints_in(p)]
    return max(found, key=lambda p: p.stat().st_mtime, default=None)


def seed_of(resume: str, run_dir: Path) -> int | None:
    """The seed of the run that `resume` means, None where nothing can be read yet."""
    place = run_dir if resume == LATEST else Path(resume)
    found = [Checkpoint(place)] if (place / MANIFEST).exists() else checkpoints_in(place)
    for checkpoint in found:
        try:
            return checkpoint.manifest.position.seed
        except StateError:
            continue
    return None
